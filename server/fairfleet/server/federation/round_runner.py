"""Holds the round under way: decides what an event leads to, makes it durable, makes it visible.

One lock orders the events of the round. Nothing is visible to a client before it is durable, with
one exception: the next model may be sent early to the clients whose task will need it. Without
the task it means nothing to them.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from fairfleet.proto.v1 import operator_pb2 as pb
from fairfleet.server.federation.background import BackgroundTasks, Executors, loop_time
from fairfleet.server.federation.clients.assignments import Assignments
from fairfleet.server.federation.clients.feature_requirements import required_features
from fairfleet.server.federation.clients.sessions import Session, Sessions
from fairfleet.server.federation.event_stream import EventStream, score_message
from fairfleet.server.federation.model_committer import ModelCommitter
from fairfleet.server.federation.scheduler import Scheduler, TrainingTimes
from fairfleet.server.federation.step_verification import StepVerification
from fairfleet.server.federation.training_clock import TrainingClock
from fairfleet.server.privacy import accountant
from fairfleet.server.privacy.accountant import SampledRelease
from fairfleet.server.privacy.budget import PrivacyBudget
from fairfleet.server.rounds import state_machine
from fairfleet.server.rounds.limits import Limits, limits_in_force
from fairfleet.server.rounds.measure_choice import MeasureChoice
from fairfleet.server.rounds.missing_evaluations import NO_TEST_DATA, missing_evaluations
from fairfleet.server.rounds.state_machine import Phase, Round
from fairfleet.server.rounds.stopping import time_is_over
from fairfleet.server.rules import Recipe
from fairfleet.server.settings import ServerSettings, plan_for_rule
from fairfleet.server.storage.client_queries import retired_clients
from fairfleet.server.storage.evaluation_queries import evaluation_write
from fairfleet.server.storage.kept_versions import KeptVersions
from fairfleet.server.storage.operations.progress import continued_limits, elapsed_seconds
from fairfleet.server.storage.queries import Write
from fairfleet.server.storage.store import Fact, Store
from fairfleet.server.transfer.prediction_bases import PredictionBases
from fairfleet.server.transfer.published_model import PublishedModel
from fairfleet.server.transfer.upload_registry import UploadRegistry

log = logging.getLogger(__name__)

# Phases in which the round no longer accepts updates.
PAST_TRAINING = (Phase.AGGREGATING, Phase.VERIFYING, Phase.COMMITTING)


@dataclass(frozen=True)
class EarlyPublication:
    """A model that is being committed, and the clients that the federation selects next."""

    publication: PublishedModel
    clients: frozenset[str]


class Decision(NamedTuple):
    """What some events lead to."""

    facts: list[Fact]  # events that change the round
    actions: list[tuple[state_machine.Action, Round]]  # each with the round that it belongs to
    round: Round


class RoundRunner:
    """The round under way, and the parts of the federation that its events concern.

    `perform` carries out an action of the state machine. It and `committer` are set before the
    first event.
    """

    committer: ModelCommitter
    perform: Callable[[state_machine.Action, Round], None]

    def __init__(
        self, store: Store, settings: ServerSettings, recipe: Recipe, sessions: Sessions
    ) -> None:
        self.store, self.policy, self.sessions = store, settings.policy(), sessions
        self.events, self.background, self.executors = EventStream(), BackgroundTasks(), Executors()
        self.requirements = required_features(
            plan_for_rule(settings.plan, recipe),
            always=settings.round.required_features,
            measure=MeasureChoice.of(settings.measure).name,
        )
        self.privacy_budget = (
            PrivacyBudget(store, settings.privacy, recipe) if settings.privacy else None
        )
        self.retired = retired_clients(store)  # by their owners, with the reason
        self.scheduler = Scheduler(
            settings, store, self.requirements, self.privacy_budget, self.retired
        )
        self.assignments = Assignments(sessions)
        self.training_times = TrainingTimes(loop_time())
        self.clock = TrainingClock(elapsed_seconds(store))
        self.limit(limits_in_force(settings.limits_of_end(), continued_limits(store)))
        self.upload_registry = UploadRegistry(
            store,
            store.signature(),
            settings.durability == "update",
            settings.limits.upload_bytes,
            self.executors.workers,
            settings.compression.prediction_bytes,
        )
        # The rows of a private federation are clipped: they differ from what the clients sent.
        predicts = settings.compression.prediction and settings.privacy is None
        self.prediction_bases: PredictionBases | None = (
            self.upload_registry.bases if predicts else None
        )
        self.kept_versions = KeptVersions(
            store,
            settings.keep_models,
            lambda: self.scheduler.scores.measure,
            self.scheduler.scores.direction_of,
        )
        self._result: PublishedModel | None = None
        # Version 0, if the rule needs the loss of clients on it.
        self.initial_model: PublishedModel | None = None
        self._minimum_clients = settings.round.minimum_clients
        self.revoked = store.revoked()  # clients, with the reason
        self._exhausted = set[str]()  # clients whose spent budget was logged
        self.lock = asyncio.Lock()
        self.round = Round(0)
        self._no_best_because = ""  # as it was logged last
        self.is_held = False  # no round begins, for the reason `held_because`
        self.stopping = False  # the server is shutting down: it begins nothing new
        self.drained = asyncio.Event()  # the federation is finished, and no client is connected
        self.evaluation = pb.EvaluationFinished()  # the counts of the evaluation under way
        self.verification: StepVerification | None = None  # of the step that clients try
        self.early_publication: EarlyPublication | None = None  # while its commit is written

    @property
    def best_version(self) -> int | None:
        """The best version of those whose evaluation is over and that are kept; or None."""
        return self.kept_versions.best(self.under_evaluation)

    @property
    def under_evaluation(self) -> int | None:
        """The version that clients evaluate at present; None if they evaluate none."""
        return self.round.number if self.round.phase is Phase.EVALUATING else None

    @property
    def result(self) -> PublishedModel | None:
        """The model that the federation ended with; None before clients may learn of the end."""
        return self._result if self.round.phase is Phase.FINISHED else None

    def publish_result(self, result: PublishedModel | None) -> None:
        """Let clients fetch the federation's result; None takes an earlier one back."""
        self._result = result

    def limit(self, limits: Limits) -> None:
        """Let the federation end at these limits."""
        self.policy = replace(self.policy, rounds=limits.rounds)
        self.limits = limits
        self.scheduler.limit(limits.seconds)

    def time_is_over(self) -> str | None:
        """Return that the federation has run for as long as it may; None if it has not."""
        return time_is_over(self.limits.seconds, self.clock.seconds())

    # ---- events --------------------------------------------------------------------------------

    async def record(self, *events: state_machine.Event, writes: Sequence[Write] = ()) -> None:
        """Apply events, and whatever follows from them, even if the caller is cancelled.

        `writes` are part of their transaction.
        """
        await self.background.run_to_completion(self._apply_locked(events, writes))

    async def _apply_locked(
        self, events: Sequence[state_machine.Event], writes: Sequence[Write]
    ) -> None:
        async with self.lock:
            await self.apply(*events, writes=writes)

    async def apply(
        self,
        *events: state_machine.Event,
        writes: Sequence[Write] = (),
        announcements: Iterable[dict[str, Any]] = (),
        early: PublishedModel | None = None,
        publish: Callable[[], None] = lambda: None,
    ) -> None:
        """Decide what the events lead to, store it in one transaction, then make it visible.

        The caller holds the lock. Without events, only what follows by itself is applied, such as
        a round for which enough clients are connected by now. `announcements` about the events are
        emitted after the transaction. `early` is a model that the events commit. `publish` changes
        the state in memory, before the actions are performed.
        """
        decision = await self._decide(events)
        missing = missing_evaluations(decision.facts, self._unable_to_evaluate)
        writes = [
            *writes,
            *(evaluation_write(version, client, None, why) for version, client, why in missing),
        ]
        if early is not None:
            self._send_early(early, decision)
        ends = decision.round.phase is Phase.FINISHED
        if decision.round.number != self.round.number or ends:
            writes.append(self.clock.write())
        if writes or self._must_be_durable(decision.facts):
            record = self.store.record
            await self.executors.in_database(record, decision.facts, decision.round, *writes)
        self._announce(announcements, decision.facts)
        self.round = decision.round
        if self.round.phase is not Phase.FINISHED:
            self._result = None  # the federation goes on
        self._announce_hold()
        publish()
        for action, round_ in decision.actions:
            self.perform(action, round_)

    # ---- deciding ------------------------------------------------------------------------------

    async def _decide(self, events: Sequence[state_machine.Event]) -> Decision:
        """Return what these events lead to, and then what follows by itself."""
        facts, actions = list[Fact](), list[tuple[state_machine.Action, Round]]()
        round_, pending = self.round, deque(events)
        while event := pending.popleft() if pending else await self._next_event(round_):
            after, decided = state_machine.step(round_, event, self.policy)
            if after != round_:
                facts.append((round_, event, after))
            actions += [(action, after) for action in decided]
            round_ = after
        return Decision(facts, actions, round_)

    async def _next_event(self, round_: Round) -> state_machine.Event | None:
        """Return what follows by itself: the end of the federation, or a selection of clients."""
        if self.stopping:
            return None
        # Clients that leave meanwhile are lost right after the selection.
        sessions = self.sessions.all()
        if round_.phase is Phase.WAITING and not round_.asked and not round_.received:
            reason = self.scheduler.reason_to_end(self.clock.seconds())
            if reason := reason or await self.exhausted_budget(sessions):
                return state_machine.StopRequested(reason)
        return self.scheduler.choose(round_, sessions)

    def _unable_to_evaluate(self) -> Iterator[tuple[str, str]]:
        """Yield the connected clients that cannot be selected to evaluate, and why."""
        for session in self.sessions.all():
            if not session.member.test_samples:
                yield session.client, NO_TEST_DATA
            elif not self.scheduler.may_evaluate(session):
                yield session.client, self.obstacle(session)

    def obstacle(self, session: Session) -> str:
        """Return why a connected client is not selected for some tasks; empty if it can be."""
        budget = self.privacy_budget
        return (
            self.requirements.obstacle(session.member)
            or (budget.obstacle(session.client) if budget else "")
            or self.retired.get(session.client, "")
        )

    async def exhausted_budget(self, sessions: Sequence[Session]) -> str | None:
        """Return why the privacy budget allows no further round; None if it does."""
        if self.privacy_budget is None:
            return None
        if self.privacy_budget.retires_clients:
            clients = [session.client for session in sessions]
            self._log_exhausted(clients)
            gone = self.revoked.keys() | self.retired.keys()
            return self.privacy_budget.too_few_left(clients, gone, self._minimum_clients)
        connected = len(self.scheduler.able_to_train(sessions))
        lot = self.scheduler.next_lot(connected)
        if draw := self.privacy_budget.draw_of_next(*lot):
            if connected < self._minimum_clients:
                # No such lot is drawn. Each client that joins would cause a useless computation.
                return None
            await self.compute_divergences(draw)
        return self.privacy_budget.reason_to_end(*lot)

    def _log_exhausted(self, clients: Iterable[str]) -> None:
        """Log once of each of these clients that its privacy budget is spent."""
        for client in clients:
            budget = self.privacy_budget
            if budget and client not in self._exhausted and (why := budget.obstacle(client)):
                self._exhausted.add(client)
                about = {"client": client, "round": self.round.number}
                log.info("client %s takes part no more: %s", client, why, extra=about)

    async def compute_divergences(self, *draws: SampledRelease | None) -> None:
        """Compute what past and given draws cost, where it is unknown, off the event loop."""
        budget = self.privacy_budget
        if budget is None:
            return
        for draw in budget.unknown(*draws):
            divergences = await self.executors.in_worker(accountant.divergences_of, draw)
            await self.executors.in_database(budget.keep, draw, divergences)

    def _must_be_durable(self, facts: Sequence[Fact]) -> bool:
        """Return whether the facts need a transaction: updates in memory do not."""
        if self.upload_registry.durable:
            return bool(facts)
        return not all(isinstance(event, state_machine.UpdateStored) for _, event, _ in facts)

    # ---- announcing ----------------------------------------------------------------------------

    def emit(self, **kind: Any) -> None:
        """Send an event of the current round to watchers."""
        self.events.emit(self.round.number, **kind)

    def _announce(self, announcements: Iterable[dict[str, Any]], facts: Sequence[Fact]) -> None:
        for announcement in announcements:
            self.emit(**announcement)
        for before, _, after in facts:
            if before.phase is Phase.EVALUATING and after.phase is not Phase.EVALUATING:
                scores = self.kept_versions.scores(before.number)
                if score := scores.get(self.scheduler.scores.measure):
                    self.evaluation.score.CopyFrom(score_message(score))
                self.events.emit(before.number, evaluation_finished=self.evaluation)
                self.evaluation = pb.EvaluationFinished()  # the next one may select nobody
                self._warn_without_best(before.number)

    def _warn_without_best(self, version: int) -> None:
        """Log once why no version is the best although clients evaluate."""
        why = self.kept_versions.why_no_best()
        if why and why != self._no_best_because:
            log.warning("no version is kept as the best: %s", why, extra={"round": version})
        self._no_best_because = why

    @property
    def held_because(self) -> str:
        """Why no round begins although no operator paused; empty if rounds may begin.

        A stopping rule can never apply, or too many clients have retired.
        """
        if self.scheduler.held_because or self.privacy_budget is None or not self.retired:
            return self.scheduler.held_because
        connected = [session.client for session in self.sessions.all()]
        return self.privacy_budget.too_many_retired(
            connected, self.retired, self.revoked, self._minimum_clients
        )

    def _announce_hold(self) -> None:
        """Say once that no round begins any more, and why; and when rounds begin again."""
        waits = self.round.phase is Phase.WAITING and not self.round.asked
        reason, about = self.held_because if waits else "", {"round": self.round.number}
        if reason and not self.is_held:
            log.error("no round begins: %s", reason, extra=about)
            self.emit(federation_paused=pb.FederationPaused(reason=reason))
        elif self.is_held and not reason and self.round.phase is not Phase.FINISHED:
            log.info("rounds can begin again", extra=about)
            if not self.round.paused:
                self.emit(federation_resumed=pb.FederationResumed())
        self.is_held = bool(reason)

    def _send_early(self, publication: PublishedModel, decision: Decision) -> None:
        """Let clients that will need a model fetch it while its transaction is written."""
        selected = [
            action.clients
            for action, _ in decision.actions
            if isinstance(action, state_machine.Train | state_machine.Evaluate)
        ]
        self.early_publication = EarlyPublication(publication, frozenset().union(*selected))
        self.assignments.wake_for_models(self.early_publication.clients)

    def check_drained(self) -> None:
        """Set `drained` if the federation is finished and the last client is gone."""
        if self.round.phase is Phase.FINISHED and not len(self.sessions):
            self.drained.set()

    # ---- updates that are still of use ---------------------------------------------------------

    def wants(self, client: str, number: int) -> bool:
        """Return whether an update for this round is still of use, to it or to the history."""
        if number == self.round.number and self.round.takes_update_of(client):
            return True
        return self.round.phase is not Phase.FINISHED and self.wants_late(client, number)

    def wants_late(self, client: str, number: int) -> bool:
        """Return whether the history would keep an update that its round continued without."""
        is_late = number < self.round.number or self.round.phase in PAST_TRAINING
        ahead = int(number == self.round.number)  # commits until the update is late
        return (
            is_late
            and client not in self.revoked
            and self.committer.wants_late(client, number, ahead)
        )

    def keeps_late(self, client: str, number: int) -> bool:
        """Return whether an unfinished late upload is kept in memory.

        The client must be connected: one that never returns would occupy the memory forever.
        """
        return self.sessions.get(client) is not None and self.wants_late(client, number)

    def continue_without(self, client: str, number: int) -> None:
        """Treat a client's upload as late: keep what was received if it is still of use."""
        self.upload_registry.continue_without(
            client, number, wanted=self.keeps_late(client, number)
        )
