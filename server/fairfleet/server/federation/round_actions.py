"""Carries out the actions of the state machine: tasks, deadlines, aggregation, the end.

Actions are safe to repeat: after a restart the last ones are carried out again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection
from dataclasses import replace

from fairfleet.common.errors import short
from fairfleet.common.names import round_name
from fairfleet.proto.v1 import operator_pb2 as pb
from fairfleet.server.federation.background import loop_time
from fairfleet.server.federation.clients.assignments import Kind
from fairfleet.server.federation.federation_result import publish_result
from fairfleet.server.federation.round_commit import RoundCommits
from fairfleet.server.federation.round_runner import RoundRunner
from fairfleet.server.federation.staged_model import StepProposal, Updates
from fairfleet.server.federation.step_verification import StepVerification
from fairfleet.server.rounds import state_machine
from fairfleet.server.rounds.state_machine import DeadlinePassed, Phase, Round
from fairfleet.server.rules import Recipe
from fairfleet.server.settings import ServerSettings
from fairfleet.server.storage.step_queries import trials_of

log = logging.getLogger(__name__)


class Deadline:
    """The deadline of the current attempt; a new one replaces it."""

    def __init__(self, runner: RoundRunner) -> None:
        self.ends = 0.0  # in the event loop's time
        self._runner = runner
        self._timer: asyncio.TimerHandle | None = None

    def set(self, round_: Round) -> None:
        """Begin to wait for the clients of a round."""
        self.cancel()
        runner = self._runner
        ends = self.ends = loop_time() + runner.scheduler.patience(round_.phase, round_.asked)
        number, event = runner.round.number, DeadlinePassed(runner.round.attempt)
        self._timer = asyncio.get_running_loop().call_at(
            ends, lambda: runner.background.spawn(self._passed(number, event, ends))
        )

    def cancel(self) -> None:
        """Stop the timer."""
        if self._timer:
            self._timer.cancel()

    async def _passed(self, number: int, event: DeadlinePassed, ends: float) -> None:
        async with self._runner.lock:
            round_ = self._runner.round
            if (round_.number, self.ends) != (number, ends):
                return  # the round went on, or got another deadline, before the lock was free
            verifying = round_.phase is Phase.VERIFYING
            if silent := round_.asked if verifying else round_.asked | round_.lost:
                names, about = short(", ".join(sorted(silent)), 200), {"round": number}
                log.warning(
                    "%s: the deadline passed without %s", round_name(number), names, extra=about
                )
            await self._runner.apply(event)


class RoundActions:
    """Carries out actions; aggregation and verification lead to the round's commit."""

    def __init__(
        self, runner: RoundRunner, commits: RoundCommits, settings: ServerSettings, recipe: Recipe
    ) -> None:
        self._runner, self._commits = runner, commits
        self._trial_policy = settings.trying.terms()
        self._verification_policy = settings.verification.terms() if settings.verification else None
        self._steps_may_be_tried = (
            self._verification_policy is not None or recipe.rule.needs().line_search
        )
        self._deadline = Deadline(runner)
        self._training_seconds = 0.0  # of the round that is being aggregated

    def perform(self, action: state_machine.Action, round_: Round) -> None:
        """Carry out one action; `round_` is the round as it is after the action's event."""
        match action:
            case state_machine.Train(clients):
                self._train(clients, round_)
            case state_machine.Evaluate(clients):
                self._evaluate(clients, round_)
            case state_machine.Wait():
                self._deadline.set(round_)
            case state_machine.Release(clients):
                self._release(clients, round_)
            case state_machine.Verify(clients):
                self._verify(clients, round_)
            case state_machine.Aggregate(clients):
                self._begin_aggregation(clients)
            case state_machine.Commit():
                self._runner.background.spawn(self._take_step())
            case state_machine.Finish(reason):
                self._finish(reason, round_)

    def stop(self) -> None:
        """Let no further deadline pass."""
        self._deadline.cancel()

    # ---- tasks ---------------------------------------------------------------------------------

    def _assign(self, kind: Kind, clients: Collection[str], round_: Round) -> None:
        self._deadline.set(round_)
        self._runner.assignments.assign(
            kind, round_.number, round_.attempt, clients, self._deadline.ends
        )

    def _train(self, clients: Collection[str], round_: Round) -> None:
        now, times = loop_time(), self._runner.training_times
        if round_.attempt == 0:
            times.begin(now)
        times.select(clients, now)
        self._runner.upload_registry.expect(round_.asked | round_.received)
        self._assign("train", clients, round_)
        started = pb.RoundStarted(
            clients=sorted(clients), attempt=round_.attempt, received=len(round_.received)
        )
        self._runner.emit(round_started=started)

    def _evaluate(self, clients: Collection[str], round_: Round) -> None:
        self._assign("evaluate", clients, round_)
        self._runner.evaluation = pb.EvaluationFinished(asked=len(clients))
        started = pb.EvaluationStarted(clients=sorted(clients))
        self._runner.emit(evaluation_started=started)

    def _verify(self, clients: Collection[str], round_: Round) -> None:
        verification = self._runner.verification
        if verification is None:
            return  # a restarted server must aggregate again before clients can try the step
        self._assign("verify", clients, round_)
        halvings = verification.proposal.trials.halvings
        started = pb.VerificationStarted(clients=sorted(clients), halvings=halvings)
        self._runner.emit(verification_started=started)

    def _release(self, clients: Collection[str], round_: Round) -> None:
        self._runner.assignments.release(clients)
        for client in clients:
            if round_.phase is Phase.AGGREGATING:
                selected_at = self._runner.training_times.selected_at(client)
                self._runner.scheduler.cut_off(client, round_.number, selected_at, loop_time())
            self._runner.continue_without(client, round_.number)

    def _finish(self, reason: str, round_: Round) -> None:
        number = round_.number
        about = {"round": number}
        self._runner.clock.halt()
        log.info("federation finished at version %d: %s", number, reason, extra=about)
        self._runner.publish_result(None)  # perhaps of an earlier end
        self._runner.background.spawn(publish_result(self._runner))
        self._runner.emit(federation_finished=pb.FederationFinished(reason=reason))

    # ---- aggregation and verification ----------------------------------------------------------

    def _begin_aggregation(self, clients: Collection[str]) -> None:
        if not self._steps_may_be_tried:
            # Otherwise a client that tries the step may still need the model before it.
            self._runner.committer.publication.retire()
        self._runner.emit(aggregation_started=pb.AggregationStarted(updates=len(clients)))
        self._runner.background.spawn(self._aggregate(clients))

    async def _aggregate(self, clients: Collection[str]) -> None:
        runner = self._runner
        self._training_seconds = training_seconds = loop_time() - runner.training_times.began
        selected = runner.round.asked | runner.round.received | runner.round.lost
        result = await runner.executors.in_aggregator(
            runner.committer.aggregate,
            self._updates_of(clients),
            runner.executors.workers,
            self._verification_policy,
            selected,
        )
        if isinstance(result, StepProposal):
            await self._propose(result)
        else:
            await self._commits.commit(result, training_seconds)

    def _updates_of(self, clients: Collection[str]) -> Updates:
        complete = self._runner.upload_registry.complete_updates
        return {client: complete[client] for client in sorted(clients)}

    async def _propose(self, proposal: StepProposal) -> None:
        """Let participants try a step, apart from those that did so before a restart."""
        runner, step = self._runner, proposal.publication.digest
        answers = await runner.executors.in_database(
            trials_of, runner.store, runner.round.number, step
        )
        async with runner.lock:
            verification = runner.verification = StepVerification(proposal, answers)
            codec = runner.committer.downlink.codec
            clients = verification.to_ask(
                verification.participants, runner.sessions, codec, runner.requirements
            )
            await runner.apply(state_machine.StepProposed(clients))

    async def _take_step(self) -> None:
        """Commit the step that the answers of the verification support."""
        runner, verification = self._runner, self._runner.verification
        assert verification is not None
        updates = self._updates_of(runner.upload_registry.complete_updates)
        verdict = verification.verdict(self._trial_policy)
        number = runner.round.number
        about = {"round": number}
        log.info("%s: %s (%s)", round_name(number), verdict.outcome, verdict.reason, extra=about)
        staged = await runner.executors.in_aggregator(
            runner.committer.take,
            verification.proposal,
            verdict.halvings,
            updates,
            runner.executors.workers,
        )
        verified = verification.record(verdict, verification.participants)
        record = replace(staged.record, verification=verified)
        await self._commits.commit(replace(staged, record=record), self._training_seconds)
