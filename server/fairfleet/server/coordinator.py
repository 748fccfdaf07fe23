"""The shell round the pure round: it feeds time and messages into `rounds.step`, makes the outcome
durable, and then does what was decided.

Everything here runs on one event loop; what takes long (decoding, aggregation, the disk) runs in
threads. One lock orders the events of the round, and nothing is visible to a client before it is durable.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Iterator, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from fairfleet.common import wire
from fairfleet.common.errors import FleetError, Refused, Revoked, TryLater, WrongState, short
from fairfleet.common.reports import Evaluation
from fairfleet.proto.v1 import operator_pb2 as pb
from fairfleet.server import rounds
from fairfleet.server.broadcast import Broadcast
from fairfleet.server.committing import Committed, Committer, record_out
from fairfleet.server.downlink import Downlink
from fairfleet.server.intake import Intake
from fairfleet.server.publication import Publication
from fairfleet.server.roster import POLL_SECONDS, Assignment, Roster
from fairfleet.server.rounds import Phase, Round
from fairfleet.server.rules.base import PastRow
from fairfleet.server.scheduling import Scheduler
from fairfleet.server.sessions import Member, Session, Sessions
from fairfleet.server.settings import ServerSettings
from fairfleet.server.store import Fact, Store, StoredUpdate, Write
from fairfleet.server.uploads import Announced, Upload, check_announced

log = logging.getLogger(__name__)
T = TypeVar("T")

SWEEP_SECONDS = 1.0
WAITING_NEWS_SECONDS = 30.0
GATHER_SECONDS = 0.05  # rows that arrive within so little are multiplied together, which is cheaper than one by one
WORKERS = 4
STANDS_IN = "it came too late for its round, and stands for its client in later ones"


@dataclass(frozen=True)
class Receipt:
    round: int
    digest: bytes
    counted: bool
    durable: bool
    reason: str = ""
    in_history: bool = False  # too late for its round; it stands for its client in later ones


@dataclass(frozen=True)
class Arrival:
    """A whole upload that waits to be recorded."""

    upload: Upload
    counted: asyncio.Future[bool]


@dataclass
class Traffic:
    received_bytes: int = 0
    sent_bytes: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)  # of updates: late, repeated, refused


class Coordinator:
    def __init__(self, store: Store, settings: ServerSettings) -> None:
        self.settings = settings
        self.signature = store.signature()
        self.recipe = settings.recipe()
        self.plan = settings.plan_of(self.recipe)
        self.broadcast = Broadcast()
        self.traffic = Traffic()
        self.rows_evicted = 0  # from the history, since the start
        self.stopping = False
        self.all_told = asyncio.Event()  # that the federation is finished: nobody is connected any more
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.sessions = Sessions(settings.lease_seconds, settings.limits.clients, store.next_boot())
        self._store = store
        self._policy = settings.policy()
        self._scheduler = Scheduler(settings, store)
        self._round = Round(0)
        self._lock = asyncio.Lock()
        self._late_lock = asyncio.Lock()  # one late update after the other: a client may send the same one twice
        self._database = ThreadPoolExecutor(1, "database")
        self._workers = ThreadPoolExecutor(WORKERS, "worker")
        self._aggregator = ThreadPoolExecutor(1, "aggregator")  # its scratch memory is there once, not per worker
        self._roster = Roster(self.sessions)
        self._intake = Intake(store, self.signature, settings.durability == "update", settings.limits.upload_bytes)
        self._arrivals: list[Arrival] = []
        self._committer: Committer
        self._revoked = store.revoked()
        self._background: set[asyncio.Task[None]] = set()
        self._units: set[asyncio.Task[Any]] = set()  # transactions under way, with their effects
        self._deadline: asyncio.TimerHandle | None = None
        self._ends = 0.0  # when it passes, in the event loop's time
        self._gathering: asyncio.TimerHandle | None = None
        self._evaluation = pb.EvaluationFinished()  # of the evaluation under way, so far
        self._started = self._asked_at = self._now()
        self._alone_since = self._said_so = self._started  # since when there are too few clients, and when it was said

    # ---- life ----------------------------------------------------------------------------------

    async def start(self) -> None:
        """Takes up the federation where the state directory left it."""
        stored = self._store.current_round()
        down = self.settings.compression
        self._committer = await self._in_worker(
            Committer.open, self._store, stored.number, self.recipe, self.settings.history, down.downlink, down.changes
        )
        await self._in_database(self._store.delete_unnamed, stored.number)
        updates = {update.client: update for update in self._store.updates_of(stored.number) if update.file}
        self._round, actions = rounds.resume(stored, self._policy, frozenset(updates))
        for client in self._round.received:
            await self._in_worker(self._intake.restore, updates[client])
            self._add_row(client)
        phase, received = self._round.phase.value, len(self._round.received)
        log.info("%s: round %d is %s with %d updates", self._store.federation, stored.number, phase, received)
        for action in actions:
            self._carry_out(action, self._round)
        self._spawn(self._sweep())

    def let_go(self) -> None:
        """The server is about to stop: whoever waits for news is told to try again."""
        self.stopping = True
        self._roster.wake_all()
        self.broadcast.close()

    async def stop(self) -> None:
        """Finishes what is being written. To be called when no call is under way any more."""
        async with self._lock:
            for timer in (self._deadline, self._gathering):
                if timer:
                    timer.cancel()
        await asyncio.gather(*self._units, return_exceptions=True)
        for task in list(self._background):
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        self._aggregator.shutdown(wait=True)
        self._workers.shutdown(wait=True)
        self._database.shutdown(wait=True)

    @property
    def round(self) -> Round:
        return self._round

    @property
    def publication(self) -> Publication:
        return self._committer.publication

    @property
    def downlink(self) -> Downlink:
        return self._committer.downlink

    @property
    def uptime_seconds(self) -> float:
        return self._now() - self._started

    @property
    def revoked(self) -> Set[str]:
        return self._revoked.keys()

    def past_rows(self) -> list[PastRow]:
        """The history: whose row of which round is kept."""
        return self._committer.past_rows()

    def missing_clients(self) -> int:
        waiting = self._round.phase is Phase.WAITING
        return max(0, self.settings.round.minimum_clients - len(self.sessions)) if waiting else 0

    # ---- clients -------------------------------------------------------------------------------

    async def join(self, member: Member) -> Session:
        self._refuse_revoked(member.client)
        session = self.sessions.join(member, self._now())
        self._intake.close(member.client)
        self._roster.wake(member.client)  # a poll of the session that was just superseded learns of it
        log.info("client %s joined (%s, %d samples)", member.client, short(member.device), member.train_samples)
        joined = pb.ClientJoined(client=member.client, device=member.device, train_samples=member.train_samples)
        joined.connected = len(self.sessions)
        self._emit(client_joined=joined)
        if self._lock.locked() or self._round.phase in (Phase.WAITING, Phase.EVALUATING):
            await self._record()  # it may be the one that was missing; in other phases nobody is
        return session

    def session(self, id: str) -> Session:
        session = self.sessions.of(id, self._now())
        self._refuse_revoked(session.client)
        return session

    async def next_task(self, id: str) -> Assignment | None:
        """What the client is to do; None when there is nothing yet, or nothing ever again (see `round`)."""
        session = self.session(id)
        idle = self._roster.assignment(session.client) is None
        if idle and self._round.phase is not Phase.FINISHED and not self.stopping:
            await self._roster.wait(session)
            self.session(id)  # it may have been superseded or revoked meanwhile
        return self._roster.assignment(session.client)

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
        self._check_all_told()

    @contextmanager
    def transferring(self, client: str) -> Iterator[None]:
        """A model or an update is on its way: a sign of life, however long it takes."""
        session = self.sessions.get(client)
        if session is None:
            yield
            return
        session.polls += 1
        try:
            yield
        finally:
            session.polls -= 1
            session.last_seen = self._now()

    def progress(self, id: str, task: str, done: int, planned: int, loss: float) -> bool:
        """A busy client's sign of life; whether its task is still wanted."""
        client = self.session(id).client
        if not self._roster.holds(client, task):
            return False
        self._emit(
            training_progress=pb.TrainingProgress(client=client, steps_done=done, steps_planned=planned, loss=loss)
        )
        return True

    async def give_up(self, id: str, task: str, why: str) -> None:
        """The client cannot do the task: the round goes on without it."""
        client = self.session(id).client
        if self._roster.holds(client, task):
            log.warning("client %s cannot do %s: %s", client, task, short(why, 300))
            await self._lost(client)

    async def leave(self, id: str, reason: str) -> None:
        await self._gone(self.session(id), reason or "left")

    async def report_evaluation(self, id: str, version: int, evaluation: Evaluation | None, failure: str) -> None:
        await self._whole(self._evaluated(self.session(id).client, version, evaluation, failure))

    async def _evaluated(self, client: str, version: int, evaluation: Evaluation | None, failure: str) -> None:
        async with self._lock:
            wanted = self._round.phase is Phase.EVALUATING and self._round.number == version
            if not wanted or client not in self._round.asked:
                return  # a repetition, or too late to be of use
            reported = pb.EvaluationReported(client=client, failure=failure)
            if evaluation:
                reported.evaluation.CopyFrom(wire.evaluation_out(evaluation))
            self._roster.release([client])
            self._scheduler.evaluated(version, client, evaluation.accuracy if evaluation else None)
            self._evaluation.reported += evaluation is not None
            write = self._store.evaluation_write(version, client, evaluation, failure)
            await self._apply(rounds.Evaluated(client), writes=[write], news=[{"evaluation_reported": reported}])

    # ---- uploads -------------------------------------------------------------------------------

    async def open_upload(self, id: str, announced: Announced, model_digest: bytes) -> Upload | Receipt:
        self.session(id)
        check_announced(announced, self._intake.limit_bytes)
        client, number = announced.client, announced.round
        self._scheduler.came_late(client, number, self._now())
        if receipt := await self._receipt_for(client, number):
            return receipt
        if number > self._round.number:
            raise WrongState(f"round {number} is not known here; this server is at round {self._round.number}")
        late = number < self._round.number
        trained = await self._in_database(self._store.model_digest, number) if late else self.publication.digest
        if model_digest != trained:
            raise WrongState(
                f"the update of {client} was computed on model {model_digest.hex()[:16]}…; "
                f"round {number} trains {(trained or b'').hex()[:16]}…. Ask for a new task."
            )
        if not late and not self._round.takes_update_of(client):
            raise WrongState(f"client {client} was not asked to train in round {number}; ask for a new task")
        upload = self._intake.upload_for(announced, in_memory=late)
        if upload.path is None:
            upload.reopen()  # no file, nothing to wait for
        else:
            await self._in_worker(upload.reopen)
        if not self._intake.holds(upload):
            upload.discard()
            raise WrongState(f"round {number} went on while the upload was opened; ask for a new task")
        self._intake.opened(upload)
        return upload

    async def _receipt_for(self, client: str, number: int) -> Receipt | None:
        """The answer to an update that is here already, or that came too late; None: it may be sent."""
        if number > self._round.number:
            return None
        if number == self._round.number:
            if found := self._intake.whole.get(client):
                async with self._lock:  # its transaction may still be being written
                    if self.failed.done():
                        raise TryLater("the server could not write to its database; try again")
                    return Receipt(number, found[0].digest, counted=True, durable=self._intake.durable)
            if self._round.phase in (Phase.WAITING, Phase.TRAINING, Phase.EVALUATING):
                return None
            if self._round.phase is Phase.AGGREGATING and self._committer.wants_late(client, number, ahead=1):
                raise TryLater(f"round {number} is being committed without {client}; try again in a moment")
        if stored := await self._in_database(self._store.update_of, client, number):
            return Receipt(number, stored.digest, counted=True, durable=True)
        if digest := await self._in_database(self._store.history_digest, client, number):
            return Receipt(number, digest, counted=False, durable=True, reason=STANDS_IN, in_history=True)
        if self._committer.wants_late(client, number):
            return None
        late = f"round {number} went on without {client}; its update came too late"
        return Receipt(number, b"", counted=False, durable=True, reason=late)

    def upload(self, token: bytes) -> Upload:
        return self._intake.by_token(token)

    async def take_chunks(self, upload: Upload, token: bytes, messages: list[bytes]) -> None:
        self.traffic.received_bytes += sum(len(message) for message in messages)
        await self._in_worker(upload.take, token, messages)

    async def complete(self, upload: Upload, token: bytes, rest: list[bytes]) -> Receipt:
        """Makes an upload that is whole with these messages count, once; the receipt only when it is durable."""
        self.traffic.received_bytes += sum(len(message) for message in rest)
        try:
            await self._in_worker(upload.finish, token, rest)
        except Refused:
            if upload.spoiled:
                self._intake.drop(upload)
            raise
        late = upload.announced.round < self._round.number
        return await self._whole(self._arrive_late(upload) if late else self._arrive(upload))

    async def _arrive_late(self, upload: Upload) -> Receipt:
        """Never part of a model that it was not computed on; but the client's newest word, if it is."""
        client, number = upload.announced.client, upload.announced.round
        async with self._late_lock:
            if not self._intake.holds(upload) or client in self._revoked:
                raise WrongState(f"the late update of {client} is no longer wanted; ask for a new task")
            if self._committer.wants_late(client, number):
                await self._remember_late(upload)
            else:
                self._intake.drop(upload)
        return await self._receipt_or_another_try(client, number)

    async def _remember_late(self, upload: Upload) -> None:
        update = self._intake.release(upload)
        try:
            await self._in_aggregator(self._committer.remember_late, update, upload.row)
        except OSError as error:  # no fact speaks of it yet
            raise TryLater(f"the server cannot write to its disk: {error.strerror}") from error
        finally:
            self._intake.give_back(upload)
        await self._in_database(self._store.write, self._store.history_write([update]))
        await self._in_aggregator(self._committer.late_is_named, update)

    async def _arrive(self, upload: Upload) -> Receipt:
        arrival = Arrival(upload, asyncio.get_running_loop().create_future())
        self._arrivals.append(arrival)
        async with self._lock:
            if self._arrivals:  # else whoever had the lock before has taken this one along
                await self._take_arrivals()
        if await arrival.counted:
            return Receipt(upload.announced.round, upload.announced.digest, True, self._intake.durable)
        return await self._receipt_or_another_try(upload.announced.client, upload.announced.round)

    def _go_on_without(self, client: str, number: int) -> None:
        """What a client has sent so far is not thrown away if its update is still good for the history."""
        over = number < self._round.number or self._round.phase is Phase.AGGREGATING
        ahead = int(number == self._round.number)  # commits until the update is late
        wanted = over and client not in self._revoked and self._committer.wants_late(client, number, ahead)
        self._intake.go_on_without(client, number, wanted=wanted)

    async def _receipt_or_another_try(self, client: str, number: int) -> Receipt:
        if receipt := await self._receipt_for(client, number):
            return receipt
        raise TryLater(f"round {number} went on while the update of {client} came in; open it again")

    async def _take_arrivals(self) -> None:
        """All that came while the last transaction was written go into one. Under the lock."""
        arrivals, self._arrivals = self._arrivals, []
        round, events, writes, news = self._round, list[rounds.Event](), list[Write](), list[dict[str, Any]]()
        for arrival in arrivals:
            announced = arrival.upload.announced
            wanted = announced.round == round.number and round.takes_update_of(announced.client)
            if not wanted or announced.client in self._revoked or not self._intake.holds(arrival.upload):
                if self._intake.holds(arrival.upload):
                    self._go_on_without(announced.client, announced.round)
                arrival.counted.set_result(False)
                continue
            update = self._intake.keep(arrival.upload)
            self._add_row(announced.client)
            self._scheduler.took(announced.client, announced.round, self._now() - self._asked_at)
            self._roster.release([announced.client])
            events.append(rounds.UpdateStored(announced.client))
            round, _ = rounds.step(round, events[-1], self._policy)
            writes += [self._store.update_write(update)] if self._intake.durable else []
            news.append({"update_received": update_received(update, round)})
        try:
            await self._apply(*events, writes=writes, news=news)
        except Exception as error:
            self._fail(error)  # what is in memory is no longer what is on the disk
            for arrival in arrivals:
                if not arrival.counted.done():
                    arrival.counted.set_exception(error)
            return
        for arrival in arrivals:
            if not arrival.counted.done():
                arrival.counted.set_result(True)

    def _add_row(self, client: str) -> None:
        round = self._round
        self._committer.add(client, self._intake.whole[client][1], round.asked | round.received | round.lost)
        if self._gathering is None:
            loop = asyncio.get_running_loop()
            self._gathering = loop.call_later(GATHER_SECONDS, lambda: self._spawn(self._multiply()))

    async def _multiply(self) -> None:
        self._gathering = None
        await self._in_aggregator(self._committer.multiply)

    def discard(self, upload: Upload) -> None:
        """An upload that can never become right: the client's next one begins at 0."""
        self._intake.drop(upload)

    # ---- operators -----------------------------------------------------------------------------

    async def pause(self) -> None:
        await self._record(rounds.Paused())
        self._emit(federation_paused=pb.FederationPaused())

    async def resume(self) -> None:
        self._emit(federation_resumed=pb.FederationResumed())
        await self._record(rounds.Resumed())

    async def end(self, reason: str) -> None:
        await self._record(rounds.StopRequested(reason))

    async def revoke(self, client: str, reason: str) -> None:
        await self._in_database(self._store.revoke, client, reason)
        self._revoked[client] = reason
        self._committer.shut_out(client)
        self._intake.drop_of(client)
        if session := self.sessions.get(client):
            self._part(session, "revoked")
        self._roster.release([client])
        await self._record(rounds.ClientRevoked(client))
        self._check_all_told()

    def _refuse_revoked(self, client: str) -> None:
        if client in self._revoked:
            raise Revoked(f"client {client} was revoked: {short(self._revoked[client]) or 'no reason given'}")

    # ---- the round -----------------------------------------------------------------------------

    async def _record(self, *events: rounds.Event) -> None:
        await self._whole(self._locked(*events))

    async def _locked(self, *events: rounds.Event) -> None:
        async with self._lock:
            await self._apply(*events)

    async def _whole(self, work: Coroutine[Any, Any, T]) -> T:
        """To its end, even if the caller hangs up in the middle: no transaction without its effects."""
        task = asyncio.create_task(work)
        self._units.add(task)
        task.add_done_callback(self._unit_over)
        return await asyncio.shield(task)

    def _unit_over(self, task: asyncio.Task[Any]) -> None:
        self._units.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, FleetError):
            self._fail(error)

    async def _apply(
        self,
        *events: rounds.Event,
        writes: Sequence[Write] = (),
        news: Sequence[dict[str, Any]] = (),
        and_then: Callable[[], None] = lambda: None,
    ) -> None:
        """Events and what follows from them, under the lock: decided, on the disk by one transaction, then visible.

        Without an event, only what may follow: the connected clients may suffice for something by now. `news` of
        the events is told before what they lead to.
        """
        round, facts, todo = self._round, list[Fact](), list[tuple[rounds.Action, Round]]()
        left = deque(events)
        while event := left.popleft() if left else self._choose(round):
            after, actions = rounds.step(round, event, self._policy)
            if after != round:
                facts.append((round, event, after))
            todo += [(action, after) for action in actions]
            round = after
        only_in_memory = not self._intake.durable and all(isinstance(e, rounds.UpdateStored) for _, e, _ in facts)
        if writes or (facts and not only_in_memory):
            await self._in_database(self._store.record, facts, round, *writes)
        for piece in news:
            self._emit(**piece)
        if any(ends_evaluation(before, after) for before, _, after in facts):
            self._emit(evaluation_finished=self._evaluation)
        self._round = round
        and_then()
        for action, at in todo:
            self._carry_out(action, at)

    def _choose(self, round: Round) -> rounds.Event | None:
        """What follows by itself: an end that is reached, or clients to be asked."""
        if self.stopping:
            return None
        fresh = round.phase is Phase.WAITING and not round.asked and not round.received
        if fresh and (reason := self._scheduler.reason_to_end(time.time())):
            return rounds.StopRequested(reason)
        return self._scheduler.choose(round, self.sessions.all())

    def _carry_out(self, action: rounds.Action, round: Round) -> None:
        match action:
            case rounds.Train(clients):
                if round.attempt == 0:
                    self._asked_at = self._now()
                self._set_deadline(self._scheduler.patience(round.phase, round.asked))
                self._roster.assign("train", round.number, round.attempt, clients, self._ends)
                started = pb.RoundStarted(clients=sorted(clients), attempt=round.attempt, received=len(round.received))
                self._emit(round_started=started)
            case rounds.Evaluate(clients):
                self._set_deadline(self._scheduler.patience(round.phase, round.asked))
                self._roster.assign("evaluate", round.number, round.attempt, clients, self._ends)
                self._evaluation = pb.EvaluationFinished(asked=len(clients))
                self._emit(evaluation_started=pb.EvaluationStarted(clients=sorted(clients)))
            case rounds.Wait():
                self._set_deadline(self._scheduler.patience(round.phase, round.asked))
            case rounds.Release(clients):
                self._roster.release(clients)
                if round.phase is Phase.AGGREGATING:
                    self._scheduler.cut_off(clients, round.number, self._asked_at, self._now())
                for client in clients:
                    self._go_on_without(client, round.number)
            case rounds.Aggregate(clients):
                self.publication.retire()
                self._emit(aggregation_started=pb.AggregationStarted(updates=len(clients)))
                self._spawn(self._aggregate(clients))
            case rounds.Finish(reason):
                log.info("federation finished at version %d: %s", round.number, reason)
                self._roster.release_all()
                self._check_all_told()
                self._emit(federation_finished=pb.FederationFinished(reason=reason))

    def _set_deadline(self, seconds: float) -> None:
        if self._deadline:
            self._deadline.cancel()
        self._ends = self._now() + seconds
        number, passed, ends = self._round.number, rounds.DeadlinePassed(self._round.attempt), self._ends
        loop = asyncio.get_running_loop()
        self._deadline = loop.call_at(ends, lambda: self._spawn(self._deadline_passed(number, passed, ends)))

    async def _deadline_passed(self, number: int, event: rounds.DeadlinePassed, ends: float) -> None:
        async with self._lock:
            if (self._round.number, self._ends) != (number, ends):
                return  # while this waited for the lock, the round went on or got another deadline
            if late := self._round.asked | self._round.lost:
                log.warning("round %d: the deadline passed without %s", number, short(", ".join(sorted(late)), 200))
            await self._apply(event)

    async def _aggregate(self, clients: frozenset[str]) -> None:
        training_seconds = self._now() - self._asked_at
        updates = {client: self._intake.whole[client] for client in sorted(clients)}
        committed = await self._in_aggregator(self._committer.aggregate, updates, self._workers)
        async with self._lock:
            await self._commit(committed, training_seconds)
        await self._in_worker(self._store.retire_round, committed.stored.version, self.settings.keep_models)

    async def _commit(self, committed: Committed, training_seconds: float) -> None:
        record = committed.record | {
            "dropped": sorted(self._round.lost),
            "attempts": self._round.attempt + 1,
            "training_seconds": training_seconds,
        }
        keep = self.settings.keep_models
        writes = [
            self._store.commit_writes(committed.stored, record, keep),
            self._store.history_write(committed.remembered, committed.forgotten),
        ]
        if not self._intake.durable:
            writes = [self._store.update_write(update) for update, _ in self._intake.whole.values()] + writes

        # Before the next round's clients are chosen, which the same transaction does.
        self._scheduler.counted(update for update, _ in self._intake.whole.values())

        def publish() -> None:
            self._committer.adopt(committed, self._intake.whole)
            self._intake.clear(committed.stored.version, self._committer.wants_late)
            self.rows_evicted += record["history_evicted"]

        news = {"round_committed": pb.RoundCommitted(record=record_out(record, committed.diagnostics_json))}
        stored = rounds.ModelStored(committed.stored.version)
        await self._apply(stored, writes=writes, news=[news], and_then=publish)

    async def _lost(self, client: str) -> None:
        self._roster.release([client])
        await self._record(rounds.ClientLost(client))  # it may just be being chosen: only under the lock is that known

    async def _gone(self, session: Session, reason: str) -> None:
        self._part(session, reason)
        await self._lost(session.client)
        self._check_all_told()

    def _part(self, session: Session, reason: str) -> None:
        self.sessions.remove(session)
        self._intake.drop_late(session.client, self._round.number)
        self._roster.wake(session.client)
        log.info("client %s is gone: %s", session.client, short(reason))
        self._emit(client_gone=pb.ClientGone(client=session.client, reason=reason, connected=len(self.sessions)))

    def _check_all_told(self) -> None:
        if self._round.phase is Phase.FINISHED and not len(self.sessions):
            self.all_told.set()

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
                for client in [client for client in self._round.asked if self.sessions.get(client) is None]:
                    await self._lost(client)

    async def _wait_for_fleet(self) -> None:
        """Says how many clients are missing, now and then, and gives up when that is wanted."""
        now, longest = self._now(), self.settings.round.longest_wait_seconds
        if self._round.paused or not self.missing_clients():
            self._alone_since = self._said_so = now
            return
        words = self._scheduler.too_few(len(self.sessions))
        if now - self._said_so >= WAITING_NEWS_SECONDS:
            self._said_so = now
            log.info("round %d: %s", self._round.number, words)
        if longest is not None and now - self._alone_since >= longest and not self._round.stopping:
            log.warning("round %d: %s, and that for %g s", self._round.number, words, longest)
            await self._record(rounds.StopRequested(f"{words}; gave up after {longest:g} s"))

    # ---- plumbing ------------------------------------------------------------------------------

    def _emit(self, **kind: Any) -> None:
        self.broadcast.emit(self._round.number, **kind)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._over)

    def _over(self, task: asyncio.Task[None]) -> None:
        """A failure of our own (a full disk, a bug) ends the server; the state directory stays as it is."""
        self._background.discard(task)
        if not task.cancelled() and (error := task.exception()):
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        if not self.failed.done():
            self.failed.set_exception(error)

    async def _in_worker(self, work: Callable[..., T], *given: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._workers, work, *given)

    async def _in_aggregator(self, work: Callable[..., T], *given: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._aggregator, work, *given)

    async def _in_database(self, work: Callable[..., T], *given: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._database, work, *given)

    def _now(self) -> float:
        return asyncio.get_running_loop().time()


def update_received(update: StoredUpdate, round: Round) -> pb.UpdateReceived:
    """The news of an update, with the round that it led to."""
    return pb.UpdateReceived(
        client=update.client,
        size_bytes=update.size_bytes,
        report=wire.report_out(update.report),
        received=len(round.received),
        asked=len(round.asked),
    )


def spread_out(clients: int, polls_per_second: int) -> float:
    """How long each of so many idle clients stays away between two polls, beside the time that a poll is held.

    >>> spread_out(1_000, 200), spread_out(10_000, 200)
    (0.0, 25.0)
    """
    return max(0.0, clients / polls_per_second - POLL_SECONDS)


def ends_evaluation(before: Round, after: Round) -> bool:
    return before.phase is Phase.EVALUATING and bool(before.asked) and after.phase is not Phase.EVALUATING
