"""Who is connected: sessions, their leases, and who speaks for an identity when two processes claim it.

Kept in memory only: after a restart every client simply joins again. Time is given, never read.
"""

from __future__ import annotations

import secrets
from collections import OrderedDict, defaultdict, deque
from dataclasses import dataclass
from typing import NamedTuple

from fairfleet.common.errors import ContestedIdentity, LimitReached, SessionUnknown, Superseded

TAKEOVERS_ALLOWED = 3  # by other processes, within the window: a reboot or two, not a tug of war
TAKEOVER_WINDOW_SECONDS = 60.0
SUPERSEDED_REMEMBERED = 10_000


@dataclass(frozen=True)
class Member:
    """What a client says of itself when it joins."""

    client: str
    instance: str
    device: str
    train_samples: int
    test_samples: int
    codecs: tuple[str, ...]  # and what else it knows of compression
    verifies: bool = False  # can try a step before it is taken
    since: int = 0  # the fence of its process's first Join; 0: this is it
    predicts: bool = False  # can tell an update by an earlier one


class Speaker(NamedTuple):
    """The process that joined as a client last, and the fence of its first Join: the larger, the newer it is."""

    instance: str
    since: int


@dataclass
class Session:
    id: str
    fence: int
    member: Member
    last_seen: float
    told: str = ""  # the task that it heard of last
    polls: int = 0  # calls of NextTask that wait now: while there is one, the lease does not run

    @property
    def client(self) -> str:
        return self.member.client


class Sessions:
    def __init__(self, lease_seconds: float, limit: int, boot: int) -> None:
        self.lease_seconds = lease_seconds
        self._limit = limit
        self._fence = boot << 32  # grows over restarts without a write per join
        self._by_id: dict[str, Session] = {}
        self._by_client: dict[str, Session] = {}
        self._superseded: OrderedDict[str, str] = OrderedDict()
        self._speakers: OrderedDict[str, Speaker] = OrderedDict()  # by client, also of those that are gone
        self._takeovers: defaultdict[str, deque[float]] = defaultdict(deque)

    def __len__(self) -> int:
        return len(self._by_client)

    def all(self) -> list[Session]:
        return list(self._by_client.values())

    def join(self, member: Member, now: float) -> Session:
        self._refuse_older(member)
        holder = self._by_client.get(member.client)
        if holder is not None:
            if holder.member.instance != member.instance:
                self._check_takeover(holder, now)
                self._supersede(holder)
            self.remove(holder)
        elif len(self) >= self._limit:
            raise LimitReached(
                f"{self._limit} clients are connected, which is this server's limit; come back later", reason="clients"
            )
        self._fence += 1
        session = Session(secrets.token_hex(16), self._fence, member, now)
        self._by_id[session.id] = self._by_client[member.client] = session
        self._let_speak(member)
        return session

    def of(self, id: str, now: float) -> Session:
        """The session of a call, its lease renewed."""
        session = self.find(id)
        session.last_seen = now
        return session

    def find(self, id: str) -> Session:
        if session := self._by_id.get(id):
            return session
        if client := self._superseded.get(id):
            raise taken_over(client)
        raise SessionUnknown("this session is not known here (the server restarted, or the lease ended); join again")

    def get(self, client: str) -> Session | None:
        return self._by_client.get(client)

    def remove(self, session: Session) -> None:
        self._by_id.pop(session.id, None)
        if self._by_client.get(session.client) is session:
            del self._by_client[session.client]

    def expired(self, now: float) -> list[Session]:
        return [s for s in self._by_client.values() if not s.polls and now - s.last_seen > self.lease_seconds]

    def _refuse_older(self, member: Member) -> None:
        """A process that lost its link, and with it its session, must not take the client back from a newer one."""
        speaker = self._speakers.get(member.client)
        if speaker and speaker.instance != member.instance and 0 < member.since < speaker.since:
            raise taken_over(member.client)

    def _let_speak(self, member: Member) -> None:
        self._speakers[member.client] = Speaker(member.instance, member.since or self._fence)
        self._speakers.move_to_end(member.client)
        if len(self._speakers) > self._limit + SUPERSEDED_REMEMBERED:
            self._speakers.popitem(last=False)

    def _supersede(self, holder: Session) -> None:
        self._superseded[holder.id] = holder.client
        if len(self._superseded) > SUPERSEDED_REMEMBERED:
            self._superseded.popitem(last=False)

    def _check_takeover(self, holder: Session, now: float) -> None:
        times = self._takeovers[holder.client]
        while times and now - times[0] > TAKEOVER_WINDOW_SECONDS:
            times.popleft()
        if len(times) >= TAKEOVERS_ALLOWED:
            raise ContestedIdentity(
                f"{holder.client} was taken over {len(times)} times within {TAKEOVER_WINDOW_SECONDS:.0f} s: two "
                "processes claim this identity. Stop one of them, or give each its own --name."
            )
        times.append(now)


def taken_over(client: str) -> Superseded:
    return Superseded(
        f"another process joined as {client} and took over. Stop one of the two, or give each its own --name."
    )
