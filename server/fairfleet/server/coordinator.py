"""What clients and operators may ask of a federation: the round, its uploads and its sessions, put together.

Everything here runs on one event loop; what takes long (decoding, aggregation, the disk) runs in threads.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Sequence, Set
from contextlib import contextmanager
from typing import Any

from fairfleet.common.errors import Revoked, short
from fairfleet.common.identity import Identity, Role
from fairfleet.common.privacy import Terms
from fairfleet.common.reports import Evaluation
from fairfleet.proto.v1 import operator_pb2 as pb
from fairfleet.server import rounds
from fairfleet.server.bases import Bases
from fairfleet.server.callers import Call, OpenCalls, check_speaks_for
from fairfleet.server.client_records import known_clients
from fairfleet.server.committing import Proposal
from fairfleet.server.conflict_map import ConflictMap
from fairfleet.server.downlink import Downlink
from fairfleet.server.gate import Gate
from fairfleet.server.publication import Publication
from fairfleet.server.reception import Reception
from fairfleet.server.roster import POLL_SECONDS, Assignment, round_trained
from fairfleet.server.round_loop import RoundLoop
from fairfleet.server.rounds import Phase, Round
from fairfleet.server.rules.base import PastRow
from fairfleet.server.sessions import Member, Session, Sessions
from fairfleet.server.settings import ServerSettings
from fairfleet.server.spending import Spending
from fairfleet.server.store import Store
from fairfleet.server.traffic import Traffic

log = logging.getLogger(__name__)

SWEEP_SECONDS = 1.0
WAITING_NEWS_SECONDS = 30.0


class Coordinator:
    def __init__(self, store: Store, settings: ServerSettings) -> None:
        self.settings = settings
        self.signature = store.signature()
        self.recipe = settings.recipe()
        self.plan = settings.plan_of(self.recipe)
        self.sessions = Sessions(settings.lease_seconds, settings.limits.clients, store.next_boot())
        self.gate = Gate(settings.limits)
        self._store = store
        self._loop = RoundLoop(store, settings, self.recipe, self.sessions)
        self.uploads = Reception(self._loop)
        self.broadcast, self.failed, self.all_told = self._loop.broadcast, self._loop.tasks.failed, self._loop.all_told
        self._roster, self._intake = self._loop.roster, self._loop.intake
        self.in_database = self._loop.threads.in_database
        self.calls = OpenCalls()
        self._started = self._now()
        self._alone_since = self._said_so = self._started  # since when there are too few clients, and when it was said

    # ---- life ----------------------------------------------------------------------------------

    async def start(self) -> None:
        """Takes up the federation where the state directory left it."""
        self.gate.known.recall(await self._loop.threads.in_database(known_clients, self._store))
        updates, actions = await self._loop.open()
        await self.uploads.restore(updates)
        self._loop.go_on(actions)
        self._alone_since = self._said_so = self._now()
        self._loop.tasks.spawn(self._sweep())

    def let_go(self) -> None:
        """The server is about to stop: whoever waits for news is told to try again."""
        self._loop.stopping = True
        self._roster.wake_all()
        self.broadcast.close()

    async def stop(self) -> None:
        """Finishes what is being written. To be called when no call is under way any more."""
        async with self._loop.lock:
            self.uploads.stop()
        await self._loop.stop()

    @property
    def stopping(self) -> bool:
        return self._loop.stopping

    @property
    def traffic(self) -> Traffic:
        return self.uploads.traffic

    @property
    def rows_evicted(self) -> int:
        """From the history, since the start."""
        return self._loop.rows_evicted

    @property
    def round(self) -> Round:
        return self._loop.round

    @property
    def publication(self) -> Publication:
        return self._loop.committer.publication

    @property
    def proposal(self) -> Proposal | None:
        """The step that is being tried, if one is."""
        return self._loop.verifying.proposal if self._loop.verifying else None

    @property
    def downlink(self) -> Downlink:
        return self._loop.committer.downlink

    @property
    def predicts(self) -> bool:
        """Whether updates may be told by earlier ones."""
        return self._loop.predicts

    @property
    def bases(self) -> Bases:
        return self._loop.intake.bases

    @property
    def conflict_map(self) -> ConflictMap | None:
        """Of the newest committed round, unless it was too large or of an earlier run of the server."""
        return self._loop.committer.conflict_map

    @property
    def newest_record(self) -> dict[str, Any]:
        """Of the newest round that this run of the server committed."""
        return self._loop.newest_record

    @property
    def spending(self) -> Spending | None:
        """Of the privacy budget; None where there is none."""
        return self._loop.spending

    @property
    def uptime_seconds(self) -> float:
        return self._now() - self._started

    @property
    def revoked(self) -> Set[str]:
        return self._loop.revoked.keys()

    def past_rows(self) -> list[PastRow]:
        """The history: whose row of which round is kept."""
        return self._loop.committer.past_rows()

    def missing_clients(self) -> int:
        waiting = self._loop.round.phase is Phase.WAITING
        return max(0, self.settings.round.minimum_clients - len(self.sessions)) if waiting else 0

    # ---- clients -------------------------------------------------------------------------------

    async def join(self, member: Member) -> Session:
        check_speaks_for(member.client, f"it would join as {member.client}")
        self.refuse_revoked(member.client)
        self.gate.joins.take(member.client, self._now())
        self.gate.known.add(member.client)
        session = self.sessions.join(member, self._now())
        self._intake.close(member.client)
        self._roster.wake(member.client)  # a poll of the session that was just superseded learns of it
        about = {"client": member.client, "round": self._loop.round.number}
        words = member.client, short(member.device), member.train_samples
        log.info("client %s joined (%s, %d samples)", *words, extra=about)
        joined = pb.ClientJoined(client=member.client, device=member.device, train_samples=member.train_samples)
        joined.connected = len(self.sessions)
        self._loop.emit(client_joined=joined)
        if self.doing(member.client) == "verify" and not member.verifies:  # as it may have before it was restarted
            await self._lost(member.client)
        if self._loop.lock.locked() or self._loop.round.phase in (Phase.WAITING, Phase.EVALUATING):
            await self._loop.record()  # it may be the one that was missing; in other phases nobody is
        return session

    def session(self, id: str) -> Session:
        client = self.sessions.find(id).client
        check_speaks_for(client, "the session is another client's")
        self.refuse_revoked(client)
        return self.sessions.of(id, self._now())  # not sooner: nobody else keeps a client's lease alive

    async def next_task(self, id: str) -> Assignment | None:
        """What the client is to do; None when there is nothing yet, or nothing ever again (see `round`)."""
        session = self.session(id)
        self.gate.polls.take(session.client, self._now())
        await self._until_news(session)
        return self._assignment(session)

    async def next_model(self, id: str) -> Publication | None:
        """What the client's next task is about, as soon as it is there: perhaps while it is being committed.

        None: there is no task yet, nor ever again. The task itself comes after it, see `task_of_model`.
        """
        session = self.session(id)
        self.gate.polls.take(session.client, self._now())
        if self._ahead(session.client) is None:
            await self._until_news(session, for_models=True)
        if self._roster.assignment(session.client) is not None:
            return self.publication
        return self._ahead(session.client)

    async def task_of_model(self, id: str) -> Assignment | None:
        """What the client is to do with the model that it was just sent."""
        session = self.session(id)
        if self._ahead(session.client) is not None:
            await self._until_news(session)
        return self._assignment(session)

    def _ahead(self, client: str) -> Publication | None:
        ahead = self._loop.ahead
        return ahead.publication if ahead and client in ahead.clients else None

    async def _until_news(self, session: Session, *, for_models: bool = False) -> None:
        idle = self._roster.assignment(session.client) is None
        if idle and self._loop.round.phase is not Phase.FINISHED and not self.stopping:
            await self._roster.wait(session, for_models=for_models)
            self.session(session.id)  # it may have been superseded or revoked meanwhile

    def _assignment(self, session: Session) -> Assignment | None:
        assignment = self._roster.assignment(session.client)
        if assignment is not None and assignment.id != session.told:
            session.told = assignment.id
            self.gate.polls.give_back(session.client)  # however short its rounds are, a fast fleet polls once for each
        return assignment

    def send_away(self, id: str) -> float:
        """For how many seconds an idle client is to stay away, and may: polls of a large fleet are spread out."""
        session = self.session(id)
        seconds = spread_out(len(self.sessions), self.settings.limits.polls_per_second)
        session.last_seen = self._now() + seconds
        return seconds

    def doing(self, client: str) -> str:
        assignment = self._roster.assignment(client)
        return assignment.kind if assignment else ""

    def told_finished(self, id: str) -> None:
        """The client has heard that there is nothing more to do, and goes."""
        self.sessions.remove(self.session(id))
        self._loop.check_all_told()

    @contextmanager
    def transferring(self, client: str) -> Iterator[Call]:
        """A model or an update is on its way: a sign of life, however long it takes; but a revocation ends it."""
        session = self.sessions.get(client)
        with self.calls.of(Identity(Role.CLIENT, client)) as call:
            if session is None:
                yield call
                return
            session.polls += 1
            try:
                yield call
            finally:
                session.polls -= 1
                session.last_seen = self._now()

    def progress(self, id: str, task: str, done: int, planned: int, loss: float) -> bool:
        """A busy client's sign of life; whether its task is still wanted.

        Who trains on past the deadline is let, if its update is good for the history. It may be asked anew meanwhile:
        that task waits until it has sent this one's result.
        """
        client = self.session(id).client
        if not self._roster.holds(client, task):
            number = round_trained(task)
            return number is not None and self._loop.wants(client, number)
        self._loop.emit(
            training_progress=pb.TrainingProgress(client=client, steps_done=done, steps_planned=planned, loss=loss)
        )
        return True

    async def give_up(self, id: str, task: str, why: str) -> None:
        """The client cannot do the task: the round goes on without it."""
        client = self.session(id).client
        if self._roster.holds(client, task):
            about = {"client": client, "round": self._loop.round.number}
            log.warning("client %s cannot do %s: %s", client, task, short(why, 300), extra=about)
            await self._lost(client)

    async def leave(self, id: str, reason: str) -> None:
        await self._gone(self.session(id), reason or "left")

    async def report_evaluation(
        self, id: str, version: int, evaluation: Evaluation | None, failure: str, made: Terms
    ) -> None:
        """`made`: what was done to it for the sake of privacy."""
        client = self.session(id).client
        await self._loop.tasks.whole(self._loop.take_evaluation(client, version, evaluation, failure, made))

    async def report_verification(
        self, id: str, number: int, step: bytes, losses: Sequence[float], failure: str
    ) -> None:
        client = self.session(id).client
        await self._loop.tasks.whole(self._loop.take_trial(client, number, step, losses, failure))

    # ---- operators -----------------------------------------------------------------------------

    async def pause(self) -> None:
        await self._loop.record(rounds.Paused())
        self._loop.emit(federation_paused=pb.FederationPaused())

    async def resume(self) -> None:
        self._loop.emit(federation_resumed=pb.FederationResumed())
        await self._loop.record(rounds.Resumed())

    async def end(self, reason: str) -> None:
        await self._loop.record(rounds.StopRequested(reason))

    async def revoke(self, client: str, reason: str) -> None:
        await self._loop.threads.in_database(self._store.revoke, client, reason)
        self._loop.revoked[client] = reason
        self.calls.end(Identity(Role.CLIENT, client), self._words_of_revoked(client))
        self._loop.committer.shut_out(client)
        self._intake.drop_of(client)
        if session := self.sessions.get(client):
            self._part(session, "revoked")
        self._roster.release([client])
        await self._loop.record(rounds.ClientRevoked(client))
        self._loop.check_all_told()

    def refuse_revoked(self, client: str) -> None:
        if client in self._loop.revoked:
            raise Revoked(self._words_of_revoked(client))

    def _words_of_revoked(self, client: str) -> str:
        return f"client {client} was revoked: {short(self._loop.revoked[client]) or 'no reason given'}"

    # ---- silence -------------------------------------------------------------------------------

    async def _lost(self, client: str) -> None:
        self._roster.release([client])
        # It may just be being chosen: only under the lock is that known.
        await self._loop.record(rounds.ClientLost(client))

    async def _gone(self, session: Session, reason: str) -> None:
        self._part(session, reason)
        await self._lost(session.client)
        self._loop.check_all_told()

    def _part(self, session: Session, reason: str) -> None:
        self.sessions.remove(session)
        self._intake.drop_late(session.client, self._loop.round.number)
        self._roster.wake(session.client)
        about = {"client": session.client, "round": self._loop.round.number}
        log.info("client %s is gone: %s", session.client, short(reason), extra=about)
        self._loop.emit(client_gone=pb.ClientGone(client=session.client, reason=reason, connected=len(self.sessions)))

    async def _sweep(self) -> None:
        """Ends leases. Clients asked before a restart that did not come back count as silent since the start."""
        while True:
            await asyncio.sleep(min(SWEEP_SECONDS, self.settings.lease_seconds / 4))
            await self._wait_for_fleet()
            now = self._now()
            for session in self.sessions.expired(now):
                if session in self.sessions.expired(self._now()):  # it may have come back while others were seen to
                    await self._gone(session, f"silent for {self.settings.lease_seconds:g} s")
            if now - self._started > self.settings.lease_seconds:
                for client in [client for client in self._loop.round.asked if self.sessions.get(client) is None]:
                    await self._lost(client)

    async def _wait_for_fleet(self) -> None:
        """Says how many clients are missing, now and then, and gives up when that is wanted."""
        now, longest = self._now(), self.settings.round.longest_wait_seconds
        if self._loop.round.paused or not self.missing_clients():
            self._alone_since = self._said_so = now
            return
        words = self._loop.scheduler.too_few(len(self.sessions))
        if now - self._said_so >= WAITING_NEWS_SECONDS:
            self._said_so = now
            log.info("round %d: %s", self._loop.round.number, words)
        if longest is not None and now - self._alone_since >= longest and not self._loop.round.stopping:
            log.warning("round %d: %s, and that for %g s", self._loop.round.number, words, longest)
            await self._loop.record(rounds.StopRequested(f"{words}; gave up after {longest:g} s"))

    def _now(self) -> float:
        return asyncio.get_running_loop().time()


def spread_out(clients: int, polls_per_second: int) -> float:
    """How long each of so many idle clients stays away between two polls, beside the time that a poll is held.

    >>> spread_out(1_000, 200), spread_out(10_000, 200)
    (0.0, 25.0)
    """
    return max(0.0, clients / polls_per_second - POLL_SECONDS)
