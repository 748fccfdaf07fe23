"""Accepts what clients report about models: evaluations, and the losses of a proposed step.

A result is stored with the event that it is for the round. A result that nobody requested is
refused; a repetition, or one that comes too late, is ignored.
"""

from __future__ import annotations

from collections.abc import Sequence

from fairfleet.common.errors import WrongState
from fairfleet.common.names import round_name
from fairfleet.common.privacy import PrivacyTerms
from fairfleet.common.reports import Evaluation
from fairfleet.common.wire import evaluation_out
from fairfleet.proto.v1 import operator_pb2 as pb
from fairfleet.server.federation.round_runner import RoundRunner
from fairfleet.server.federation.step_verification import StepVerification
from fairfleet.server.rounds import state_machine
from fairfleet.server.rounds.state_machine import Phase
from fairfleet.server.storage.client_queries import asked_to_verify
from fairfleet.server.storage.evaluation_queries import evaluation_write, was_asked
from fairfleet.server.storage.step_queries import trial_write


class ReportedResults:
    """Applies the results that clients report to the round."""

    def __init__(self, runner: RoundRunner) -> None:
        self._runner = runner

    # ---- evaluations ---------------------------------------------------------------------------

    async def take_evaluation(
        self,
        client: str,
        version: int,
        evaluation: Evaluation | None,
        failure: str,
        applied: PrivacyTerms,
    ) -> None:
        """Store a client's evaluation, or why it has none; `applied` is the noise in its values."""
        runner = self._runner
        async with runner.lock:
            if version > runner.round.number:
                raise WrongState(
                    f"version {version} is not known here; this server is at {runner.round.number}"
                )
            is_awaited = self._awaits(client, version, Phase.EVALUATING)
            if not is_awaited:
                await self._refuse_unrequested_evaluation(client, version)
            if evaluation:
                evaluation = runner.scheduler.scores.accepted(client, evaluation)
                # Also if it is late: the client has released it.
                await self._spend(client, version, evaluation, applied)
            if is_awaited:
                await self._store_evaluation(client, version, evaluation, failure)

    async def _spend(
        self, client: str, version: int, evaluation: Evaluation, applied: PrivacyTerms
    ) -> None:
        if budget := self._runner.privacy_budget:
            budget.refuse_weaker_evaluation(client, applied)
            await self._runner.executors.in_database(
                budget.evaluation_reported, client, version, evaluation, applied
            )

    async def _store_evaluation(
        self, client: str, version: int, evaluation: Evaluation | None, failure: str
    ) -> None:
        runner = self._runner
        reported = pb.EvaluationReported(client=client, failure=failure)
        if evaluation:
            reported.evaluation.CopyFrom(evaluation_out(evaluation))
        runner.assignments.release([client])
        if evaluation:
            runner.scheduler.scores.add(version, client, evaluation)
        runner.evaluation.reported += evaluation is not None
        if evaluation:
            runner.kept_versions.evaluated(version, evaluation)
        await runner.apply(
            state_machine.Evaluated(client),
            writes=[evaluation_write(version, client, evaluation, failure)],
            announcements=[{"evaluation_reported": reported}],
        )

    async def _refuse_unrequested_evaluation(self, client: str, version: int) -> None:
        """Raise WrongState unless the database has a result of this client, or its absence."""
        in_database, store = self._runner.executors.in_database, self._runner.store
        if not await in_database(was_asked, store, version, client):
            raise WrongState(
                f"client {client} was not selected to evaluate version {version}; "
                "request a task first"
            )

    # ---- trials of a step ----------------------------------------------------------------------

    async def take_trial(
        self, client: str, number: int, step: bytes, losses: Sequence[float], failure: str
    ) -> None:
        """Store the losses that a client measured for the step with this digest, or its failure."""
        async with self._runner.lock:
            verification = self._runner.verification
            is_awaited = self._awaits(client, number, Phase.VERIFYING)
            if is_awaited and verification is not None and verification.step == step:
                await self._store_trial(verification, client, losses, failure)
                return
            await self._refuse_unrequested_trial(client, number)
            if is_awaited:
                raise WrongState(
                    f"{round_name(number)} does not verify a step with digest {step.hex()[:16]}…; "
                    "request the task again"
                )

    async def _store_trial(
        self, verification: StepVerification, client: str, losses: Sequence[float], failure: str
    ) -> None:
        runner, number = self._runner, self._runner.round.number
        if not failure:
            verification.check(client, losses)
        answer = None if failure else tuple(losses)
        verification.take(client, answer)
        runner.assignments.release([client])
        tried = pb.StepTried(client=client, losses=answer or (), failure=failure)
        await runner.apply(
            state_machine.StepTried(client),
            writes=[trial_write(number, client, verification.step, answer, failure)],
            announcements=[{"step_tried": tried}],
        )

    async def _refuse_unrequested_trial(self, client: str, number: int) -> None:
        """Raise WrongState unless the journal says that the client was selected to try a step.

        The journal also knows steps of earlier runs of the server, perhaps with other settings.
        """
        current = self._runner.round.number
        if number > current:
            raise WrongState(
                f"{round_name(number)} is not known here; this server is at {round_name(current)}"
            )
        in_database, store = self._runner.executors.in_database, self._runner.store
        if client not in await in_database(asked_to_verify, store, number):
            raise WrongState(
                f"client {client} was not selected to verify a step of {round_name(number)}; "
                "request a task first"
            )

    # ---- both ----------------------------------------------------------------------------------

    def _awaits(self, client: str, number: int, phase: Phase) -> bool:
        """Return whether the round is in this phase and waits for the client."""
        round_ = self._runner.round
        return round_.number == number and round_.phase is phase and client in round_.asked
