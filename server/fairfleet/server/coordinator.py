"""The shell round the pure round: it feeds time and messages into `rounds.step`, makes the outcome
durable, and then does what was decided.

Everything here runs on one event loop; what takes long (decoding, aggregation, the disk) runs in
threads. One lock orders the events of the round, and nothing is visible to a client before it is durable.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from fairfleet.common import wire
from fairfleet.common.errors import Corrupted, Revoked, StateDirError, WrongState, short
from fairfleet.common.reports import Evaluation
from fairfleet.common.tensors import Model, Section
from fairfleet.proto.v1 import operator_pb2 as pb
from fairfleet.server import rounds, selection
from fairfleet.server.broadcast import Broadcast
from fairfleet.server.committing import Committed, Committer, record_out
from fairfleet.server.publication import Publication
from fairfleet.server.rounds import Phase, Round
from fairfleet.server.sessions import Member, Session, Sessions
from fairfleet.server.settings import ServerSettings
from fairfleet.server.store import Store, StoredUpdate, Write
from fairfleet.server.uploads import Announced, Rows, Upload, check_announced, rebuild

log = logging.getLogger(__name__)
T = TypeVar("T")

POLL_SECONDS = 25.0  # how long NextTask is held: below the 30 s of the contract, and of most proxies
SWEEP_SECONDS = 1.0


@dataclass(frozen=True)
class Assignment:
    id: str
    kind: str  # "train" or "evaluate"
    version: int
    ends: float | None  # in the event loop's time

    def seconds_left(self, now: float) -> float:
        return max(0.0, self.ends - now) if self.ends is not None else 0.0


@dataclass(frozen=True)
class Receipt:
    round: int
    digest: bytes
    counted: bool
    durable: bool
    reason: str = ""


@dataclass
class Traffic:
    received_bytes: int = 0
    sent_bytes: int = 0


class Coordinator:
    def __init__(self, store: Store, settings: ServerSettings) -> None:
        self.settings = settings
        self.broadcast = Broadcast()
        self.traffic = Traffic()
        self.all_told = asyncio.Event()  # that the federation is finished: nobody is connected any more
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.signature = store.signature()
        self.sessions = Sessions(settings.lease_seconds, settings.limits.clients, store.next_boot())
        self._store = store
        self._policy = settings.policy()
        self._round = Round(0)
        self._lock = asyncio.Lock()
        self._database = ThreadPoolExecutor(1, "database")
        self._workers = ThreadPoolExecutor(4, "worker")
        self._rows = Rows(self.signature)
        self._uploads: dict[str, Upload] = {}  # by client, of the current round, under way
        self._open: dict[bytes, Upload] = {}  # by token
        self._stored: dict[str, tuple[StoredUpdate, Model]] = {}  # by client, of the current round, whole
        self._assignments: dict[str, Assignment] = {}
        self._waiting: dict[str, asyncio.Future[None]] = {}
        self._revoked: dict[str, str] = {}
        self._background: set[asyncio.Task[None]] = set()
        self._deadline: asyncio.TimerHandle | None = None
        self._started = self._now()
        self._asked_at = self._now()
        self._stopping = False

    # ---- life ----------------------------------------------------------------------------------

    async def start(self) -> None:
        """Takes up the federation where the state directory left it."""
        self._revoked = self._store.revoked()
        stored = self._store.current_round()
        self._committer = await self._in_worker(Committer.open, self._store, stored.number, self.settings)
        await self._in_database(self._store.delete_unnamed, stored.number)
        updates = {update.client: update for update in self._store.updates_of(stored.number) if update.file}
        self._round, actions = rounds.resume(stored, self._policy, frozenset(updates))
        for client in self._round.received:
            self._stored[client] = (updates[client], await self._in_worker(self._rebuilt, updates[client]))
        log.info(
            "federation %s: round %d is %s with %d updates",
            self._store.federation,
            self._round.number,
            self._round.phase.value,
            len(self._round.received),
        )
        for action in actions:
            self._carry_out(action)
        self._spawn(self._sweep())

    async def stop(self) -> None:
        """Lets go of everyone who waits, and finishes what is being written."""
        self._stopping = True
        for client in list(self._waiting):
            self._wake(client)
        self.broadcast.close()
        async with self._lock:
            if self._deadline:
                self._deadline.cancel()
        for task in list(self._background):
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        self._workers.shutdown(wait=True)
        self._database.shutdown(wait=True)

    @property
    def round(self) -> Round:
        return self._round

    @property
    def publication(self) -> Publication:
        return self._committer.publication

    @property
    def uptime_seconds(self) -> float:
        return self._now() - self._started

    @property
    def stopping(self) -> bool:
        return self._stopping

    def missing_clients(self) -> int:
        if self._round.phase is not Phase.WAITING:
            return 0
        return max(0, self.settings.round.minimum_clients - len(self.sessions))

    # ---- clients -------------------------------------------------------------------------------

    async def join(self, member: Member) -> Session:
        self._refuse_revoked(member.client)
        session = self.sessions.join(member, self._now())
        self._wake(member.client)  # a poll of the session that was just superseded learns of it
        log.info("client %s joined (%s, %d samples)", member.client, short(member.device), member.train_samples)
        self._emit(
            client_joined=pb.ClientJoined(
                client=member.client,
                device=member.device,
                train_samples=member.train_samples,
                connected=len(self.sessions),
            )
        )
        await self._pump_later()
        return session

    def session(self, id: str) -> Session:
        session = self.sessions.of(id, self._now())
        self._refuse_revoked(session.client)
        return session

    async def next_task(self, id: str) -> Assignment | None:
        """What the client is to do; None when there is nothing yet (look at `round` for whether there will be)."""
        session = self.session(id)
        if self._idle(session.client):
            await self._wait_for_task(session)
            self.session(id)  # it may have been superseded or revoked meanwhile
        return self._assignments.get(session.client)

    def told_finished(self, id: str) -> None:
        """The client has heard that there is nothing more to do, and goes."""
        self.sessions.remove(self.session(id))
        self._check_all_told()

    def _check_all_told(self) -> None:
        if self._round.phase is Phase.FINISHED and not len(self.sessions):
            self.all_told.set()

    def doing(self, client: str) -> str:
        assignment = self._assignments.get(client)
        return assignment.kind if assignment else ""

    def _idle(self, client: str) -> bool:
        return client not in self._assignments and self._round.phase is not Phase.FINISHED and not self._stopping

    async def _wait_for_task(self, session: Session) -> None:
        self._wake(session.client)  # an older poll of the same session has been given up by the client
        woken = self._waiting[session.client] = asyncio.get_running_loop().create_future()
        session.polls += 1
        try:
            await asyncio.wait([woken], timeout=POLL_SECONDS)
        finally:
            session.polls -= 1
            session.last_seen = self._now()
            if self._waiting.get(session.client) is woken:
                del self._waiting[session.client]

    def heartbeat(self, id: str, task: str) -> bool:
        """Whether the task is still wanted."""
        client = self.session(id).client
        assignment = self._assignments.get(client)
        return assignment is not None and assignment.id == task

    async def give_up(self, id: str, task: str, why: str) -> None:
        """The client cannot do the task: the round goes on without it."""
        session = self.session(id)
        if self.heartbeat(id, task):
            log.warning("client %s cannot do %s: %s", session.client, task, short(why, 300))
            await self._lost(session.client)

    async def leave(self, id: str, reason: str) -> None:
        await self._gone(self.session(id), reason or "left")

    async def report_evaluation(self, id: str, version: int, evaluation: Evaluation | None, failure: str) -> None:
        client = self.session(id).client
        async with self._lock:
            if self._round.phase is not Phase.EVALUATING or self._round.number != version:
                return  # too late to be of use
            if client not in self._round.asked:
                return
            self._emit(
                evaluation_reported=pb.EvaluationReported(
                    client=client, evaluation=wire.evaluation_out(evaluation) if evaluation else None, failure=failure
                )
            )
            self._assignments.pop(client, None)
            write = self._store.evaluation_write(version, client, evaluation, failure)
            await self._apply(rounds.Evaluated(client), write)
            await self._pump()

    # ---- uploads -------------------------------------------------------------------------------

    async def open_upload(self, id: str, announced: Announced, model_digest: bytes) -> Upload | Receipt:
        session = self.session(id)
        check_announced(announced, self._upload_limit())
        client, number = session.client, announced.round
        if receipt := await self._receipt_for(client, number):
            return receipt
        if number != self._round.number:
            raise WrongState(f"round {number} is not known here; this server is at round {self._round.number}")
        if model_digest != self.publication.digest:
            raise WrongState(
                f"the update of {client} was computed on model {model_digest.hex()[:16]}…; "
                f"round {number} trains {self.publication.digest.hex()[:16]}…. Ask for a new task."
            )
        if not self._round.takes_update_of(client):
            raise WrongState(f"client {client} was not asked to train in round {number}; ask for a new task")
        return await self._open_for(announced)

    async def _open_for(self, announced: Announced) -> Upload:
        upload = self._uploads.get(announced.client)
        if upload is None or upload.announced.digest != announced.digest:
            if upload is not None:
                self._forget(upload)
            path = None
            if self.settings.durability == "update":
                path = self._store.upload_path(announced.round, announced.client, announced.digest)
            upload = await self._in_worker(Upload, announced, self._rows.take(), path)
            self._uploads[announced.client] = upload
        self._open.pop(upload.token, None)
        self._open[upload.reopen()] = upload
        return upload

    async def _receipt_for(self, client: str, number: int) -> Receipt | None:
        """The answer to an update that is here already, or that came too late."""
        if found := self._stored.get(client):
            update, durable = found[0], self.settings.durability == "update"
            if update.round == number:
                return Receipt(number, update.digest, counted=True, durable=durable)
        if number < self._round.number or self._round.phase in (Phase.AGGREGATING, Phase.FINISHED):
            stored = await self._in_database(self._store.update_of, client, number)
            if stored is not None:
                return Receipt(number, stored.digest, counted=True, durable=True)
            if number <= self._round.number:
                return Receipt(number, b"", False, True, f"round {number} went on without {client}; it came too late")
        return None

    def upload(self, token: bytes) -> Upload:
        try:
            return self._open[token]
        except KeyError:
            raise WrongState("this upload is not open; open it again to learn where to go on") from None

    async def take_chunk(self, upload: Upload, token: bytes, message: bytes) -> None:
        self.traffic.received_bytes += len(message)
        await self._in_worker(upload.take, token, message)

    async def complete(self, upload: Upload) -> Receipt:
        """Makes a whole upload count, once; the receipt is given only when it is durable."""
        announced = upload.announced
        try:
            await self._in_worker(upload.finish)
        except Corrupted:
            self.discard(upload)
            raise
        update = StoredUpdate(
            announced.round,
            announced.client,
            announced.digest,
            announced.codec,
            announced.size_bytes,
            announced.report,
            str(upload.path.relative_to(self._store.folder)) if upload.path else None,
        )
        async with self._lock:
            current = self._round.number == announced.round
            if not current or not self._round.takes_update_of(announced.client):
                self._forget(upload)
                receipt = await self._receipt_for(announced.client, announced.round)
                return receipt or Receipt(announced.round, announced.digest, False, True, "no longer wanted")
            self._uploads.pop(announced.client, None)
            self._open.pop(upload.token, None)
            self._stored[announced.client] = (update, upload.row)
            self._assignments.pop(announced.client, None)
            await self._apply(rounds.UpdateStored(announced.client), *self._update_writes(update))
            self._emit(
                update_received=pb.UpdateReceived(
                    client=announced.client,
                    size_bytes=announced.size_bytes,
                    report=wire.report_out(announced.report),
                    received=len(self._round.received),
                    asked=len(self._round.asked),
                )
            )
            await self._pump()
        return Receipt(announced.round, announced.digest, True, self.settings.durability == "update")

    def discard(self, upload: Upload) -> None:
        """An upload that can never become right: the client's next one begins at 0."""
        if self._uploads.get(upload.announced.client) is upload:
            self._forget(upload)

    def _forget(self, upload: Upload) -> None:
        self._uploads.pop(upload.announced.client, None)
        self._open.pop(upload.token, None)
        upload.discard()  # its row is not used again: a stream may still be writing into it

    def _update_writes(self, update: StoredUpdate) -> list[Write]:
        return [self._store.update_write(update)] if self.settings.durability == "update" else []

    def _upload_limit(self) -> int:
        floats = self.signature.size(Section.PARAMETERS) + self.signature.size(Section.BUFFERS)
        needed = 4 * floats + 8 * self.signature.size(Section.COUNTERS)
        return self.settings.limits.upload_bytes or needed

    def _rebuilt(self, update: StoredUpdate) -> Model:
        row = self._rows.take()
        rebuild(row, self._store.folder / (update.file or ""), update.codec, update.digest)
        return row

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
        if session := self.sessions.get(client):
            await self._gone(session, "revoked")

    def _refuse_revoked(self, client: str) -> None:
        if client in self._revoked:
            raise Revoked(f"client {client} was revoked: {short(self._revoked[client]) or 'no reason given'}")

    # ---- the round -----------------------------------------------------------------------------

    async def _record(self, event: rounds.Event, *writes: Write) -> None:
        async with self._lock:
            await self._apply(event, *writes)
            await self._pump()

    async def _apply(self, event: rounds.Event, *writes: Write) -> None:
        """One event, under the lock: decided, on the disk, then visible."""
        before = self._round
        after, actions = rounds.step(before, event, self._policy)
        in_memory = isinstance(event, rounds.UpdateStored) and not writes
        if (after != before and not in_memory) or writes:
            await self._in_database(self._store.record, before, event, after, *writes)
        self._round = after
        for action in actions:
            self._carry_out(action)

    async def _pump(self) -> None:
        """Begins whatever the connected clients now suffice for. Under the lock."""
        chosen = self._choose()
        if chosen is not None:
            await self._apply(rounds.ClientsChosen(chosen))
            if self._round.phase is Phase.WAITING and not self._round.asked:
                await self._pump()  # an evaluation without evaluators leads straight to the next round

    async def _pump_later(self) -> None:
        async with self._lock:
            await self._pump()

    def _choose(self) -> frozenset[str] | None:
        round, wanted = self._round, self.settings.round
        if self._stopping or len(self.sessions) < wanted.minimum_clients:
            return None
        if round.phase is Phase.EVALUATING and not round.asked:
            return frozenset(session.client for session in self.sessions.all() if session.member.test_samples)
        if round.phase is Phase.WAITING and not round.paused:
            busy = round.asked | round.received
            candidates = {session.client for session in self.sessions.all()} - busy
            count = max(0, wanted.clients - len(busy))
            if not candidates or (wanted.clients and not count):
                return None
            return selection.uniform(candidates, count, (self.settings.seed, round.number, round.attempt))
        return None

    def _carry_out(self, action: rounds.Action) -> None:
        match action:
            case rounds.Train(clients):
                self._asked_at = self._now() if not self._round.attempt else self._asked_at
                self._assign("train", clients, self.settings.round.deadline_seconds)
                started = pb.RoundStarted(
                    clients=sorted(clients), attempt=self._round.attempt, received=len(self._round.received)
                )
                self._emit(round_started=started)
            case rounds.Evaluate(clients):
                self._assign("evaluate", clients, self.settings.round.evaluation_deadline_seconds)
                self._emit(evaluation_started=pb.EvaluationStarted(clients=sorted(clients)))
            case rounds.Release(clients):
                for client in clients:
                    self._assignments.pop(client, None)
                    if upload := self._uploads.get(client):
                        self._forget(upload)
            case rounds.Aggregate(clients):
                self._emit(aggregation_started=pb.AggregationStarted(updates=len(clients)))
                self._spawn(self._aggregate(clients))
            case rounds.Finish(reason):
                log.info("federation finished at version %d: %s", self._round.number, reason)
                self._assignments.clear()
                self._check_all_told()
                self._emit(federation_finished=pb.FederationFinished(reason=reason))
                for client in list(self._waiting):
                    self._wake(client)

    def _assign(self, kind: str, clients: frozenset[str], seconds: float) -> None:
        ends = self._now() + seconds
        for client in clients:
            id = f"{kind}/{self._round.number}/{self._round.attempt}/{client}"
            self._assignments[client] = Assignment(id, kind, self._round.number, ends)
            self._wake(client)
        if self._deadline:
            self._deadline.cancel()
        passed = rounds.DeadlinePassed(self._round.attempt)
        number = self._round.number
        loop = asyncio.get_running_loop()
        self._deadline = loop.call_at(ends, lambda: self._spawn(self._deadline_passed(number, passed)))

    async def _deadline_passed(self, number: int, event: rounds.DeadlinePassed) -> None:
        async with self._lock:
            if self._round.number != number:
                return
            late = sorted(self._round.asked)
            log.warning("round %d: the deadline passed; %d clients did not answer: %s", number, len(late), short(late))
            await self._apply(event)
            await self._pump()

    async def _aggregate(self, clients: frozenset[str]) -> None:
        training_seconds = self._now() - self._asked_at
        updates = {client: self._stored[client] for client in sorted(clients)}
        try:
            committed = await self._in_worker(self._committer.aggregate, updates, self._workers)
        except Exception as error:
            self._fail(error)
            return
        async with self._lock:
            record = committed.record | {
                "dropped": sorted(self._round.lost),
                "attempts": self._round.attempt + 1,
                "training_seconds": training_seconds,
            }
            await self._commit(committed, record)
            await self._pump()
        await self._in_database(self._store.delete_unnamed, self._round.number)

    async def _commit(self, committed: Committed, record: dict[str, Any]) -> None:
        keep = self.settings.keep_models
        writes = [self._store.commit_writes(committed.version, committed.digest, committed.file, record, keep)]
        if self.settings.durability == "round":
            writes = [self._store.update_write(update) for update, _ in self._stored.values()] + writes
        await self._apply(rounds.ModelStored(committed.version), *writes)
        self._committer.adopt(committed)
        for _, row in self._stored.values():
            self._rows.give_back(row)
        self._stored.clear()
        for upload in list(self._uploads.values()):
            self._forget(upload)
        self._emit(round_committed=pb.RoundCommitted(record=record_out(record)))

    async def _lost(self, client: str) -> None:
        self._assignments.pop(client, None)
        if client in self._round.asked:
            await self._record(rounds.ClientLost(client))

    async def _gone(self, session: Session, reason: str) -> None:
        self.sessions.remove(session)
        self._check_all_told()
        self._wake(session.client)
        log.info("client %s is gone: %s", session.client, short(reason))
        self._emit(client_gone=pb.ClientGone(client=session.client, reason=reason, connected=len(self.sessions)))
        await self._lost(session.client)

    async def _sweep(self) -> None:
        """Ends leases. Clients asked before a restart that did not come back count as silent since the start."""
        while True:
            await asyncio.sleep(min(SWEEP_SECONDS, self.settings.lease_seconds / 4))
            now = self._now()
            for session in self.sessions.expired(now):
                await self._gone(session, f"silent for {self.settings.lease_seconds:g} s")
            if now - self._started > self.settings.lease_seconds:
                for client in [c for c in self._round.asked if self.sessions.get(c) is None]:
                    await self._lost(client)

    # ---- plumbing ------------------------------------------------------------------------------

    def _wake(self, client: str) -> None:
        woken = self._waiting.pop(client, None)
        if woken is not None and not woken.done():
            woken.set_result(None)

    def _emit(self, **kind: Any) -> None:
        self.broadcast.emit(self._round.number, **kind)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        task.add_done_callback(lambda done: None if done.cancelled() else self._fail(done.exception()))

    def _fail(self, error: BaseException | None) -> None:
        """A failure of our own (a full disk, a bug): the server ends, the state directory stays as it is."""
        if error is not None and not self.failed.done():
            self.failed.set_exception(error)

    async def _in_worker(self, work: Callable[..., T], *given: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._workers, work, *given)

    async def _in_database(self, work: Callable[..., T], *given: Any) -> T:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._database, work, *given)
        except OSError as error:
            raise StateDirError(f"cannot write to {self._store.folder}: {error}") from error

    def _now(self) -> float:
        return asyncio.get_running_loop().time()
