"""The shell round the pure round: it feeds time and messages into `rounds.step`, makes the outcome durable, and then
does what was decided.

One lock orders the events of the round, and nothing is visible to a client before it is durable; but the bytes of the
next model may be on their way to those who will be asked about it, to whom they mean nothing without their task.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sqlalchemy.engine import Connection

from fairfleet.common import wire
from fairfleet.common.errors import WrongState, short
from fairfleet.common.privacy import Terms
from fairfleet.common.reports import Evaluation
from fairfleet.proto.v1 import operator_pb2 as pb
from fairfleet.server import rounds
from fairfleet.server.aftermath import Aftermath, Measured
from fairfleet.server.broadcast import Broadcast
from fairfleet.server.committing import Committed, Committer, Proposal
from fairfleet.server.descent_records import trial_write, trials_of
from fairfleet.server.evaluating import unanswered
from fairfleet.server.evaluation_records import evaluation_write
from fairfleet.server.facts import Write
from fairfleet.server.intake import Intake
from fairfleet.server.publication import Publication
from fairfleet.server.roster import Roster
from fairfleet.server.round_records import record_out
from fairfleet.server.rounds import Phase, Round
from fairfleet.server.rules import Recipe
from fairfleet.server.scheduling import Scheduler
from fairfleet.server.sessions import Sessions
from fairfleet.server.settings import ServerSettings
from fairfleet.server.spending import Spending
from fairfleet.server.store import Fact, Store, StoredUpdate
from fairfleet.server.tasks import Tasks
from fairfleet.server.threads import Threads
from fairfleet.server.verifying import Verifying

log = logging.getLogger(__name__)

PAST_TRAINING = (Phase.AGGREGATING, Phase.VERIFYING, Phase.COMMITTING)  # the round no longer takes updates


@dataclass(frozen=True)
class Ahead:
    """A model that is being committed, and whom the next step of the federation asks about it."""

    publication: Publication
    clients: frozenset[str]


class RoundLoop:
    """Holds the round under way, and everything that its events and actions concern."""

    committer: Committer
    aftermath: Aftermath

    def __init__(self, store: Store, settings: ServerSettings, recipe: Recipe, sessions: Sessions) -> None:
        self.broadcast = Broadcast()
        self.tasks, self.threads = Tasks(), Threads()
        self.store = store
        self.policy = settings.policy()
        self.scheduler = Scheduler(settings, store)
        self.revoked = store.revoked()  # clients, with the reason
        self.sessions, self.roster = sessions, Roster(sessions)
        durable, limit_bytes = settings.durability == "update", settings.limits.upload_bytes
        compression = settings.compression
        self.intake = Intake(
            store, store.signature(), durable, limit_bytes, self.threads.workers, compression.prediction_bytes
        )
        # The rows of a private federation are clipped: what the server would keep is not what its client sent.
        self.predicts = compression.prediction and settings.privacy is None
        self.lock = asyncio.Lock()
        self.round = Round(0)
        self.stopping = False  # the server, not the federation: nothing new is begun
        self.rows_evicted = 0  # from the history, since the start
        self.newest_record: dict[str, Any] = {}  # of the newest round that this run of the server committed
        self.all_told = asyncio.Event()  # that the federation is finished: nobody is connected any more
        self.verifying: Verifying | None = None  # the step that is being tried
        self.ahead: Ahead | None = None  # while a transaction makes it durable
        self._settings, self._recipe = settings, recipe
        self.spending = Spending(store, settings.privacy, recipe) if settings.privacy else None
        self._terms = settings.verification.terms() if settings.verification else None
        self._may_verify = self._terms is not None or recipe.rule.needs().line_search
        self._deadline: asyncio.TimerHandle | None = None
        self._ends = 0.0  # when it passes, in the event loop's time
        self._evaluation = pb.EvaluationFinished()  # of the evaluation under way, so far
        self._began_at = self._now()  # the round, or this run of the server
        self._asked_at: dict[str, float] = {}  # by client
        self._training_seconds = 0.0  # of the round, once it aggregates

    # ---- life ----------------------------------------------------------------------------------

    async def open(self) -> tuple[dict[str, StoredUpdate], tuple[rounds.Action, ...]]:
        """Takes up the round where the state directory left it: the updates it has, and what is to be done next."""
        stored = self.store.current_round()
        down = self._settings.compression
        wanted = self._settings.privacy
        self.committer = await self.threads.in_worker(
            Committer.open,
            self.store,
            stored.number,
            self._recipe,
            self._settings.history,
            down.downlink,
            down.changes,
            down.model,
            self._settings.admission,
            wanted.disguised(self._settings.cohort) if wanted else None,
            self.intake.bases if self.predicts else None,
        )
        found = self.store.updates_of(stored.number)
        needed = None if self.predicts else {update.base for update in found if update.file and update.base}
        await self.threads.in_worker(self.intake.bases.clear_away, needed)
        named = await self.threads.in_database(self.store.named_files)
        await self.threads.in_worker(self.store.files.delete_unnamed, named, stored.number)
        self.aftermath = await self.threads.in_database(Aftermath, self.store, stored.number)
        updates = {update.client: update for update in found if update.file}
        self.round, actions = rounds.resume(stored, self.policy, frozenset(updates))
        phase, received = self.round.phase.value, len(self.round.received)
        log.info("%s: round %d is %s with %d updates", self.store.federation, stored.number, phase, received)
        return updates, actions

    def go_on(self, actions: Sequence[rounds.Action]) -> None:
        for action in actions:
            self._carry_out(action, self.round)

    async def stop(self) -> None:
        """Finishes what is being written."""
        async with self.lock:
            if self._deadline:
                self._deadline.cancel()
        await self.tasks.end()
        self.threads.shut_down()

    def check_all_told(self) -> None:
        if self.round.phase is Phase.FINISHED and not len(self.sessions):
            self.all_told.set()

    def emit(self, **kind: Any) -> None:
        self.broadcast.emit(self.round.number, **kind)

    # ---- events --------------------------------------------------------------------------------

    def took(self, client: str) -> None:
        """A client's training and upload are done."""
        asked_at = self._asked_at.get(client, self._began_at)
        self.scheduler.took(client, self.round.number, self._now() - asked_at)

    def came_late(self, client: str, number: int) -> None:
        """A client announces its update, perhaps after its round went on without it."""
        self.scheduler.came_late(client, number, self._now())

    def wants(self, client: str, number: int) -> bool:
        """Whether what a client trains for this round is still of use: to the round, or else to the history."""
        if number == self.round.number and self.round.takes_update_of(client):
            return True
        return self.round.phase is not Phase.FINISHED and self.wants_late(client, number)

    def wants_late(self, client: str, number: int) -> bool:
        """Whether an update that its round went on without is still good for the history."""
        over = number < self.round.number or self.round.phase in PAST_TRAINING
        ahead = int(number == self.round.number)  # commits until the update is late
        return over and client not in self.revoked and self.committer.wants_late(client, number, ahead)

    def go_on_without(self, client: str, number: int) -> None:
        """What a client has sent so far is not thrown away if it is still wanted."""
        self.intake.go_on_without(client, number, wanted=self._keeps_late(client, number))

    def _keeps_late(self, client: str, number: int) -> bool:
        """In memory, and of clients that are here only: one that never comes back would fill it for ever."""
        return self.sessions.get(client) is not None and self.wants_late(client, number)

    async def take_evaluation(
        self, client: str, version: int, evaluation: Evaluation | None, failure: str, made: Terms
    ) -> None:
        async with self.lock:
            if version > self.round.number:
                raise WrongState(f"version {version} is not known here; this server is at {self.round.number}")
            wanted = self.round.phase is Phase.EVALUATING and self.round.number == version
            if evaluation and self.spending:
                self.spending.refuse_weaker_evaluation(client, made)
                await self.threads.in_database(self.spending.evaluation_reported, client, version, evaluation, made)
            if not wanted or client not in self.round.asked:
                return  # a repetition, or too late to be of use
            reported = pb.EvaluationReported(client=client, failure=failure)
            if evaluation:
                reported.evaluation.CopyFrom(wire.evaluation_out(evaluation))
            self.roster.release([client])
            self.scheduler.evaluated(version, client, evaluation.accuracy if evaluation else None)
            self._evaluation.reported += evaluation is not None
            write = evaluation_write(version, client, evaluation, failure)
            await self.apply(rounds.Evaluated(client), writes=[write], news=[{"evaluation_reported": reported}])

    async def take_trial(self, client: str, number: int, step: bytes, losses: Sequence[float], failure: str) -> None:
        async with self.lock:
            verifying = self.verifying
            if verifying is None or verifying.step != step or self.round.number != number:
                return  # too late to be of use
            if self.round.phase is not Phase.VERIFYING or client not in self.round.asked:
                return  # a repetition, or too late as well
            if not failure:
                verifying.check(client, losses)
            found = None if failure else tuple(losses)
            verifying.take(client, found)
            self.roster.release([client])
            tried = pb.StepTried(client=client, losses=found or (), failure=failure)
            write = trial_write(number, client, step, found, failure)
            await self.apply(rounds.StepTried(client), writes=[write], news=[{"step_tried": tried}])

    async def record(self, *events: rounds.Event) -> None:
        await self.tasks.whole(self._locked(*events))

    async def _locked(self, *events: rounds.Event) -> None:
        async with self.lock:
            await self.apply(*events)

    async def apply(
        self,
        *events: rounds.Event,
        writes: Sequence[Write] = (),
        news: Iterable[dict[str, Any]] = (),
        ahead: Publication | None = None,
        and_then: Callable[[], None] = lambda: None,
    ) -> None:
        """Events and what follows from them, under the lock: decided, on the disk by one transaction, then visible.

        Without an event, only what may follow: the connected clients may suffice for something by now. `news` of
        the events is told before what they lead to. `ahead` is a model that these events commit.
        """
        round, facts, todo = self.round, list[Fact](), list[tuple[rounds.Action, Round]]()
        left = deque(events)
        while event := left.popleft() if left else self._choose(round):
            after, actions = rounds.step(round, event, self.policy)
            if after != round:
                facts.append((round, event, after))
            todo += [(action, after) for action in actions]
            round = after
        silent = unanswered(facts, self.sessions)
        writes = [*writes, *(evaluation_write(v, client, None, why) for v, client, why in silent)]
        only_in_memory = not self.intake.durable and all(isinstance(e, rounds.UpdateStored) for _, e, _ in facts)
        if ahead is not None:
            self._send_ahead(ahead, [action for action, _ in todo])
        if writes or (facts and not only_in_memory):
            await self.threads.in_database(self.store.record, facts, round, *writes)
        for piece in news:
            self.emit(**piece)
        for before in (before for before, _, after in facts if ends_evaluation(before, after)):
            self.broadcast.emit(before.number, evaluation_finished=self._evaluation)
            self._evaluation = pb.EvaluationFinished()  # the next one may ask nobody
        self.round = round
        and_then()
        for action, at in todo:
            self._carry_out(action, at)

    def _send_ahead(self, publication: Publication, decided: Sequence[rounds.Action]) -> None:
        """Sending takes long, and so does the disk: the one need not wait for the other, only the task for both."""
        asked = [action.clients for action in decided if isinstance(action, (rounds.Train, rounds.Evaluate))]
        self.ahead = Ahead(publication, frozenset().union(*asked))
        self.roster.wake_for_models(self.ahead.clients)

    def _choose(self, round: Round) -> rounds.Event | None:
        """What follows by itself: an end that is reached, or clients to be asked."""
        if self.stopping:
            return None
        fresh = round.phase is Phase.WAITING and not round.asked and not round.received
        if fresh and (reason := self.scheduler.reason_to_end(time.time())):
            return rounds.StopRequested(reason)
        lot = self.scheduler.next_lot(len(self.sessions))
        if fresh and self.spending and (reason := self.spending.reason_to_end(*lot)):
            return rounds.StopRequested(reason)
        return self.scheduler.choose(round, self.sessions.all())

    def _carry_out(self, action: rounds.Action, round: Round) -> None:
        match action:
            case rounds.Train(clients):
                if round.attempt == 0:
                    self._began_at, self._asked_at = self._now(), {}
                self._asked_at |= dict.fromkeys(clients, self._now())
                self.intake.expect(round.asked | round.received)
                self._set_deadline(self.scheduler.patience(round.phase, round.asked))
                self.roster.assign("train", round.number, round.attempt, clients, self._ends)
                started = pb.RoundStarted(clients=sorted(clients), attempt=round.attempt, received=len(round.received))
                self.emit(round_started=started)
            case rounds.Evaluate(clients):
                self._set_deadline(self.scheduler.patience(round.phase, round.asked))
                self.roster.assign("evaluate", round.number, round.attempt, clients, self._ends)
                self._evaluation = pb.EvaluationFinished(asked=len(clients))
                self.emit(evaluation_started=pb.EvaluationStarted(clients=sorted(clients)))
            case rounds.Wait():
                self._set_deadline(self.scheduler.patience(round.phase, round.asked))
            case rounds.Release(clients):
                self.roster.release(clients)
                for client in clients:
                    if round.phase is Phase.AGGREGATING:
                        asked_at = self._asked_at.get(client, self._began_at)
                        self.scheduler.cut_off(client, round.number, asked_at, self._now())
                    self.go_on_without(client, round.number)
            case rounds.Verify(clients) if self.verifying:
                self._set_deadline(self.scheduler.patience(round.phase, round.asked))
                self.roster.assign("verify", round.number, round.attempt, clients, self._ends)
                halvings = self.verifying.proposal.trials.halvings
                self.emit(verification_started=pb.VerificationStarted(clients=sorted(clients), halvings=halvings))
            case rounds.Commit():
                self.tasks.spawn(self._take_step())
            case rounds.Aggregate(clients):
                if not self._may_verify:  # else whoever tries the step may need the model before it
                    self.committer.publication.retire()
                self.emit(aggregation_started=pb.AggregationStarted(updates=len(clients)))
                self.tasks.spawn(self._aggregate(clients))
            case rounds.Finish(reason):
                log.info("federation finished at version %d: %s", round.number, reason, extra={"round": round.number})
                self.roster.release_all()
                self.check_all_told()
                self.emit(federation_finished=pb.FederationFinished(reason=reason))

    def _set_deadline(self, seconds: float) -> None:
        if self._deadline:
            self._deadline.cancel()
        self._ends = self._now() + seconds
        number, passed, ends = self.round.number, rounds.DeadlinePassed(self.round.attempt), self._ends
        loop = asyncio.get_running_loop()
        self._deadline = loop.call_at(ends, lambda: self.tasks.spawn(self._deadline_passed(number, passed, ends)))

    async def _deadline_passed(self, number: int, event: rounds.DeadlinePassed, ends: float) -> None:
        async with self.lock:
            if (self.round.number, self._ends) != (number, ends):
                return  # while this waited for the lock, the round went on or got another deadline
            verifying = self.round.phase is Phase.VERIFYING
            if late := self.round.asked if verifying else self.round.asked | self.round.lost:
                names = short(", ".join(sorted(late)), 200)
                log.warning("round %d: the deadline passed without %s", number, names, extra={"round": number})
            await self.apply(event)

    async def _aggregate(self, clients: frozenset[str]) -> None:
        training_seconds = self._training_seconds = self._now() - self._began_at
        updates = {client: self.intake.whole[client] for client in sorted(clients)}
        made = await self.threads.in_aggregator(self.committer.aggregate, updates, self.threads.workers, self._terms)
        if isinstance(made, Proposal):
            await self._propose(made)
        else:
            await self._store_model(made, training_seconds)

    async def _propose(self, proposal: Proposal) -> None:
        number, step = self.round.number, proposal.publication.digest
        answers = await self.threads.in_database(trials_of, self.store, number, step)
        async with self.lock:
            self.verifying = Verifying(proposal, answers)
            participants, codec = self.verifying.participants, self.committer.downlink.codec
            clients = self.verifying.to_ask(participants, self.sessions, codec)
            await self.apply(rounds.StepProposed(clients))

    async def _take_step(self) -> None:
        """The verification is over: the step that its answers speak for is taken."""
        assert self.verifying is not None
        verifying, updates = self.verifying, {client: self.intake.whole[client] for client in sorted(self.intake.whole)}
        verdict = verifying.verdict(self._settings.trying.terms())
        about = {"round": self.round.number}
        log.info("round %d: %s (%s)", self.round.number, verdict.outcome, verdict.reason, extra=about)
        committed = await self.threads.in_aggregator(
            self.committer.take, verifying.proposal, verdict.halvings, updates, self.threads.workers
        )
        tried = {"verification": verifying.record(verdict, verifying.participants)}
        await self._store_model(replace(committed, record=committed.record | tried), self._training_seconds)

    async def _store_model(self, committed: Committed, training_seconds: float) -> None:
        async with self.lock:
            await self._commit(committed, training_seconds)
        await self.intake.cleared_away()
        await self.threads.in_worker(
            self.store.files.retire_round, committed.stored.version, self._settings.keep_models
        )

    async def _commit(self, committed: Committed, training_seconds: float) -> None:
        record = committed.record | {
            "dropped": sorted(self.round.lost),
            "attempts": self.round.attempt + 1,
            "training_seconds": training_seconds,
        }
        draw = None
        if self.spending:
            draw = self.spending.draw(*self.scheduler.lot_of(self.round))
            record["privacy"] = {"where": self.spending.privacy.where, "drawn": draw is not None}
        writes = [self.store.history_write(committed.remembered, committed.forgotten)]
        if not self.intake.durable:
            writes += [self.store.update_write(update) for update, _ in self.intake.whole.values()]

        # Before the next round's clients are chosen, which the same transaction does.
        updates = [update for update, _ in self.intake.whole.values()]
        if self.spending:
            clients = sorted(self.intake.whole)
            writes += self.spending.commit_writes(self.round.number, clients, draw)
            self.spending.committed(clients, draw)
        self.scheduler.counted(updates)
        told = self.aftermath.committed(self.round.number, updates, sorted(self.round.late))

        def on_disk(_: Connection) -> None:
            record["commit_seconds"] = committed.written.result()

        # Last, because the transaction may name only files that are on the disk.
        writes += [
            *told.writes,
            on_disk,
            self.store.commit_writes(committed.stored, record, self._settings.keep_models),
        ]

        def publish() -> None:
            self.verifying = self.ahead = None
            self.committer.adopt(committed, self.intake.whole)
            self.intake.clear(committed.stored.version, self._keeps_late)
            self.rows_evicted += record["history_evicted"]
            self.newest_record = record

        def news() -> Iterator[dict[str, Any]]:
            if told.measured:
                yield {"step_measured": measured_out(told.measured)}
            yield {"round_committed": pb.RoundCommitted(record=record_out(record, committed.diagnostics_json))}

        stored = rounds.ModelStored(committed.stored.version)
        ahead = committed.publication if self._may_go_ahead(committed) else None
        await self.apply(stored, writes=writes, news=news(), ahead=ahead, and_then=publish)

    def _may_go_ahead(self, committed: Committed) -> bool:
        """Not where clients can have it shorter, nor where its release must be on record before it is released."""
        shorter = committed.change.publication or committed.publication.compact
        return shorter is None and self.spending is None

    def _now(self) -> float:
        return asyncio.get_running_loop().time()


def measured_out(measured: Measured) -> pb.StepMeasured:
    found = pb.Measured(improved=measured.improved, clients=measured.clients)
    return pb.StepMeasured(round=measured.round, measured=found)


def ends_evaluation(before: Round, after: Round) -> bool:
    return before.phase is Phase.EVALUATING and after.phase is not Phase.EVALUATING
