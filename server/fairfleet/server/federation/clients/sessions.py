"""The sessions of connected clients, their leases, and which process acts for a client.

Sessions are in memory only: after a restart of the server every client joins again. Times are
arguments, so nothing here reads a clock.
"""

from __future__ import annotations

import secrets
from collections import OrderedDict, defaultdict, deque
from dataclasses import dataclass
from typing import NamedTuple

from fairfleet.common.errors import ContestedIdentity, LimitReached, SessionUnknown, Superseded
from fairfleet.common.features import COUNTS, INITIAL_LOSS

# By other processes, within the window: enough for reboots, too few for two rival processes.
TAKEOVERS_ALLOWED = 3
TAKEOVER_WINDOW_SECONDS = 60.0
SUPERSEDED_REMEMBERED = 10_000


@dataclass(frozen=True)
class ClientDescription:
    """What a client reports about itself when it joins."""

    client: str
    instance: str
    device: str
    train_samples: int
    test_samples: int
    codecs: tuple[str, ...]  # and other compression features that it supports
    verifies: bool = False  # it can try a proposed step
    since: int = 0  # the fence of its process's first Join; 0: this is the first
    predicts: bool = False  # it can delta-code an update against an earlier one
    software: str = ""  # name and version, for people to read
    features: frozenset[str] = frozenset()  # that it has, by the names in proto/FEATURES.md
    protocol_version: int = 1  # of its session

    @property
    def waits_for_data(self) -> bool:
        """Whether it has no training data yet and will say when it has.

        A client without the feature `counts` cannot say so, and is believed to have some.
        """
        return COUNTS in self.features and not self.train_samples

    @property
    def measures_initial_loss(self) -> bool:
        """Whether it can be asked for its loss on the initial model."""
        return INITIAL_LOSS in self.features


class ClientInstance(NamedTuple):
    """The process that joined last as a client; the newer it is, the larger is `since`."""

    instance: str
    since: int  # the fence of its first Join


@dataclass
class Session:
    """A connected client. Its lease ends some time after `last_seen`."""

    id: str
    fence: int  # larger than that of every earlier session, also over restarts
    member: ClientDescription
    last_seen: float
    last_task: str = ""  # the newest task that the client was given
    finished: bool = False  # the client was told that the federation is finished
    polls: int = 0  # calls that are being answered: the lease does not run meanwhile

    @property
    def client(self) -> str:
        """The client's name."""
        return self.member.client


class Sessions:
    """All sessions, at most one per client and `limit` in total."""

    def __init__(self, lease_seconds: float, limit: int, boot: int) -> None:
        self.lease_seconds = lease_seconds
        self._limit = limit
        self._fence = boot << 32  # grows over restarts without a write per join
        self._by_id: dict[str, Session] = {}
        self._by_client: dict[str, Session] = {}
        # By client without a session: whether it was told of the end.
        self._left: OrderedDict[str, bool] = OrderedDict()
        self._superseded: OrderedDict[str, str] = OrderedDict()
        # By client, including clients that are gone.
        self._instances: OrderedDict[str, ClientInstance] = OrderedDict()
        self._takeovers: defaultdict[str, deque[float]] = defaultdict(deque)

    def __len__(self) -> int:
        return len(self._by_client)

    def all(self) -> list[Session]:
        """Return all sessions."""
        return list(self._by_client.values())

    def join(self, member: ClientDescription, now: float) -> Session:
        """Open a session, which replaces the client's earlier one.

        Superseded is raised for a process older than the one that joined last, ContestedIdentity
        if two processes keep taking over from each other, LimitReached if the server is full.
        """
        self._refuse_older(member)
        holder = self._by_client.get(member.client)
        if holder is not None:
            if holder.member.instance != member.instance:
                self._check_takeover(holder, now)
                self._supersede(holder)
            self.remove(holder)
        elif len(self) >= self._limit:
            raise LimitReached(
                f"{self._limit} clients are connected, which is this server's limit; "
                "come back later",
                reason="clients",
            )
        self._fence += 1
        session = Session(secrets.token_hex(16), self._fence, member, now)
        self._by_id[session.id] = self._by_client[member.client] = session
        self._left.pop(member.client, None)
        self._note_instance(member)
        return session

    def of(self, session_id: str, now: float) -> Session:
        """Return a session and renew its lease."""
        session = self.find(session_id)
        session.last_seen = now
        return session

    def find(self, session_id: str) -> Session:
        """Return a session; raise Superseded or SessionUnknown if it is over."""
        if session := self._by_id.get(session_id):
            return session
        if client := self._superseded.get(session_id):
            raise taken_over(client)
        raise SessionUnknown(
            "this session is not known here (the server restarted, or the lease ended); join again"
        )

    def get(self, client: str) -> Session | None:
        """Return the client's session, or None."""
        return self._by_client.get(client)

    def remove(self, session: Session) -> None:
        """End a session."""
        self._by_id.pop(session.id, None)
        if self._by_client.get(session.client) is session:
            del self._by_client[session.client]
            self._left[session.client] = session.finished
            if len(self._left) > self._limit + SUPERSEDED_REMEMBERED:
                self._left.popitem(last=False)

    def left_at_the_end(self, client: str) -> bool | None:
        """Return whether a client that left was told of the end; None: it was not here."""
        return self._left.get(client)

    def expired(self, now: float) -> list[Session]:
        """Return the sessions whose lease has ended."""
        return [
            session
            for session in self._by_client.values()
            if not session.polls and now - session.last_seen > self.lease_seconds
        ]

    def _refuse_older(self, member: ClientDescription) -> None:
        """Refuse a process if a newer one took its client over while it was away."""
        newest = self._instances.get(member.client)
        if newest and newest.instance != member.instance and 0 < member.since < newest.since:
            raise taken_over(member.client)

    def _note_instance(self, member: ClientDescription) -> None:
        self._instances[member.client] = ClientInstance(
            member.instance, member.since or self._fence
        )
        self._instances.move_to_end(member.client)
        if len(self._instances) > self._limit + SUPERSEDED_REMEMBERED:
            self._instances.popitem(last=False)

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
                f"{holder.client} was taken over {len(times)} times within "
                f"{TAKEOVER_WINDOW_SECONDS:.0f} s: two processes claim this identity. "
                "Stop one of them, or give each its own --name."
            )
        times.append(now)


def taken_over(client: str) -> Superseded:
    """Return the error for a process whose client another process acts for now."""
    return Superseded(
        f"another process joined as {client} and took over. Stop one of the two, "
        "or give each its own --name."
    )
