"""A federation in one process: the server's and the client's own code, without a network.

Selection, plans, batches, aggregation, history and optimizer are those of `fairfleet server` and
`fairfleet client`, so the same seeds give the same model. A run yields the result of each round;
it may be stopped after any of them.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
from threadpoolctl import threadpool_limits

from fairfleet.common.errors import TaskFailed, UsageError
from fairfleet.common.privacy import model_refusal
from fairfleet.common.tensors import Model, Vector
from fairfleet.lab.simulation.behaviour import FleetBehaviour
from fairfleet.lab.simulation.compression import CompressionLoss, UpdateCoder
from fairfleet.lab.simulation.federation import (
    Federation,
    RoundResult,
    initial_model,
    trainer_for,
)
from fairfleet.lab.simulation.history_rows import row_store_for
from fairfleet.lab.simulation.initial_losses import InitialLosses
from fairfleet.lab.simulation.model_average import ModelAverage, copy_model
from fairfleet.lab.simulation.personal_models import PersonalModels
from fairfleet.lab.simulation.privacy import SimulatedPrivacy
from fairfleet.lab.simulation.timing import Seconds
from fairfleet.lab.simulation.trainer import (
    NOT_FINITE,
    ClientScores,
    FleetData,
    Trainer,
    TrainMeasures,
    TrainRequest,
    Work,
    check_finite,
)
from fairfleet.lab.simulation.verification import take_verified
from fairfleet.server.aggregation.admission import AdmissionContext, LossHistory
from fairfleet.server.aggregation.aggregator import Aggregation
from fairfleet.server.aggregation.finite import NonFiniteResult
from fairfleet.server.aggregation.history import History
from fairfleet.server.aggregation.participation import ParticipationBook
from fairfleet.server.aggregation.results import AggregatedStep, ServerState
from fairfleet.server.aggregation.staging import StagedStep, layer_sizes, stage_step, uses_history
from fairfleet.server.privacy.settings import ServerNoise
from fairfleet.server.rounds.attendance import AttendanceBook
from fairfleet.server.rounds.selection import POLICIES, Candidate
from fairfleet.server.rounds.verification import Losses
from fairfleet.server.rules import Report
from fairfleet.server.rules.errors import NonFiniteChoice, NonFiniteStep
from fairfleet.server.settings import plan_for_rule

Measures = Mapping[str, TrainMeasures]  # by client, in the order of the rows


class Simulation:
    """A simulated federation. `rounds()` runs it; `model` is always the newest model."""

    def __init__(self, federation: Federation) -> None:
        self.plan = plan_for_rule(federation.plan, federation.recipe)
        federation = replace(federation, recipe=federation.recipe.for_plan(self.plan))
        self.federation, self.seconds = federation, Seconds()
        data = FleetData.of(federation.clients)
        self.behaviour = FleetBehaviour(federation.behaviour, data.names, federation.seed)
        self.model = copy_model(
            federation.initial or initial_model(federation.model, federation.seed)
        )
        self.data = self._with_noisy_labels(data)
        self._privacy = self._new_privacy()
        self._number = {name: number for number, name in enumerate(data.names)}
        needed = federation.recipe.rule.needs().reports
        self._request = TrainRequest("gradient_norm" in needed, federation.loss == "after")
        self._initial_losses = InitialLosses(federation.recipe.rule, self.model)
        self.personal = (
            PersonalModels(federation.model, self.data) if self.plan.personal_lambda else None
        )
        self._begin()

    def _begin(self) -> None:
        """Set up the state that rounds change and checkpoints save."""
        federation = self.federation
        self.done = 0  # finished rounds
        self.state = ServerState()
        self.participation = ParticipationBook(initial=self._initial_losses.are_needed)
        self.coder = UpdateCoder(federation.codec, federation.error_feedback, federation.prediction)
        # By client: the round of its last report, and the loss in it.
        self.last_reports: dict[str, tuple[int, float]] = {}
        self.attendance = AttendanceBook()
        self.loss_history = LossHistory()
        self.average = ModelAverage()
        self._layers = layer_sizes(self.model.signature, federation.recipe.rule.blocks())
        self.history = self._new_history()
        self._spare = Model.empty(self.model.signature)  # memory of the next model

    def rounds(self) -> Iterator[RoundResult]:
        """Run from the current round to the last, and yield the result of each."""
        with self._trainer() as trainer, threadpool_limits(1, "blas"):
            rows = np.empty((self._row_count(), len(self.model.parameters)), np.float32)
            while self.done < self.federation.rounds:
                result = self._round(self.done, trainer, rows)
                self.done += 1
                yield result

    # ---- one round -----------------------------------------------------------------------------

    def _round(self, number: int, trainer: Trainer, rows: Vector) -> RoundResult:
        selected = self._select(number)
        clients = sorted(client for client in selected if self.behaviour.delivers(client, number))
        self.attendance.select(selected, number)
        self.attendance.deliver(clients)
        result, measures = RoundResult(number, (), math.nan, None), dict[str, TrainMeasures]()
        if clients:
            measures, compression = self._train(trainer, number, clients, rows)
            step, factor = self._aggregate(trainer, number, measures, rows)
            result = RoundResult(
                number,
                tuple(step.reports),
                float(np.mean([measured.loss for measured in measures.values()])),
                step.diagnostics,
                factor=factor,
                findings=step.findings,
                compression=compression,
            )
        if self.federation.judged == "average":
            self.average.add(self.model.parameters)
        if self._is_evaluated(number):
            scores, losses = self._evaluate(trainer, measures)
            result = replace(result, scores=scores)
            if losses:
                before = [measured.loss for measured in measures.values()]
                result = result.with_improvement(before, losses)
        return result

    def _select(self, number: int) -> frozenset[str]:
        """Select clients as the server does in the first attempt of a round."""
        present = self.behaviour.present(number)
        certain = self.behaviour.certain(number)
        count = (self.federation.clients_per_round or len(present)) - len(certain)
        candidates = [self._candidate(client) for client in present if client not in certain]
        if count <= 0 or not candidates:
            return certain
        return certain | POLICIES[self.federation.selection](
            candidates, count, (self.federation.seed, number, 0)
        )

    def _candidate(self, client: str) -> Candidate:
        last, loss = self.last_reports.get(client, (None, None))
        return Candidate(
            client,
            self.data.train.count(self._number[client]),
            last,
            loss,
            *self.attendance.of(client),
        )

    # ---- the clients' part ---------------------------------------------------------------------

    def _train(
        self, trainer: Trainer, number: int, clients: Sequence[str], rows: Vector
    ) -> tuple[dict[str, TrainMeasures], CompressionLoss | None]:
        """Fill the rows with what the server receives, after attacks and compression."""
        with self.seconds.timed("training"):
            updates = rows[: len(clients)]
            work = [
                Work(self._number[client], self.behaviour.plan(self.plan, client, number))
                for client in clients
            ]
            numbers = {client: self._number[client] for client in clients}
            initial = self._initial_losses.measure(trainer, self.participation, number, numbers)
            trained = trainer.train(self.model, work, self._request, updates)
            measures = {
                client: measured._replace(initial_loss=initial.get(client))
                for client, measured in zip(clients, trained, strict=True)
            }
            check_finite(number, measures)
            if self.personal:
                self.personal.train(self.model, work)
            for row, client in zip(updates, clients, strict=True):
                self._alter(row, client, number)
            return measures, self.coder.send(clients, updates, [own.plan.seed for own in work])

    def _alter(self, row: Vector, client: str, number: int) -> None:
        """Apply a client's privacy protection, and then its attack, to its update."""
        if self._privacy:
            self._privacy.send(row, self.model.parameters, self._number[client], number)
        if (factor := self.behaviour.update_factor(client, number)) != 1.0:
            np.multiply(row, np.float32(factor), out=row)

    def _report(self, client: str, number: int, measures: TrainMeasures) -> Report:
        samples = self.data.train.count(self._number[client])
        if self._privacy:
            measures = self._privacy.report(measures, self._number[client], number)
            samples = 1 if self._privacy.hides_samples else samples
        loss, initial = measures.loss, measures.initial_loss
        if self._request.loss_after and measures.loss_after is not None:
            loss = measures.loss_after

        def reported(loss: float) -> float:
            # A false loss is a false mean, as in FedMGDA+'s own code.
            loss = self.behaviour.reported_loss(loss, client, number)
            return loss * samples if self.federation.loss_total else loss

        return self.participation.report(
            client,
            round_number=number,
            samples=samples,
            loss=reported(loss),
            loss_before=reported(measures.loss),
            initial_loss=None if initial is None else reported(initial),
            accuracy=measures.accuracy,
            steps=measures.steps,
            gradient_norm=measures.gradient_norm,
            learning_rate=self.plan.for_round(number).learning_rate,
        )

    # ---- the server's part ---------------------------------------------------------------------

    def _aggregate(
        self, trainer: Trainer, number: int, measures: Measures, rows: Vector
    ) -> tuple[AggregatedStep, float | None]:
        """Make the next model as the server does; also return the part of the step that was taken.

        That part is None if the step was not verified.
        """
        with self.seconds.timed("aggregation"):
            updates = dict(zip(measures, rows, strict=False))
            noise = self._privacy.server_noise(number) if self._privacy else None
            if noise:
                noise.clip(updates.values())
            aggregation = self._aggregation(number, updates)
            reports = {
                client: self._report(client, number, measured)
                for client, measured in measures.items()
            }
            staged = self._stage(number, trainer, aggregation, reports, noise)
            step, factor = staged.step, None
            if staged.trials:
                policy, losses = self.federation.verification, self._losses_before(step, measures)
                factor = take_verified(self.model, self._spare, staged, policy, trainer, losses)
            aggregation.remember({client: updates[client] for client in step.reports}, reports)
            self._commit(number, step, reports, factor)
            return step, factor

    def _aggregation(self, number: int, updates: Mapping[str, Vector]) -> Aggregation:
        aggregation = Aggregation(
            self.federation.recipe,
            self._layers,
            round_number=number,
            history=self.history,
            expected=list(updates),
            admission=AdmissionContext(self.federation.admission, self.loss_history),
            diagnostics=self.federation.diagnostics,
        )
        aggregation.extend(updates)
        return aggregation

    def _stage(
        self,
        number: int,
        trainer: Trainer,
        aggregation: Aggregation,
        reports: Mapping[str, Report],
        noise: ServerNoise | None,
    ) -> StagedStep:
        """Put the next model, or a change for the clients to try, into the spare memory."""
        states, policy = trainer.states(), self.federation.verification
        try:
            return stage_step(
                aggregation,
                reports,
                self.model,
                self._spare,
                state=self.state,
                trained=dict(zip(reports, states, strict=True)) if states else {},
                halvings=policy.halvings if policy else None,
                add_noise=noise.apply if noise else None,
            )
        except (NonFiniteChoice, NonFiniteStep, NonFiniteResult) as error:
            raise TaskFailed(f"in round {number} {NOT_FINITE}") from error

    def _losses_before(self, step: AggregatedStep, measures: Measures) -> Losses:
        """Return the losses that trials are compared with: the admitted ones, as on the server.

        A sum over samples, or a loss after training, is only for the rule: no trial could be
        compared with it.
        """
        if self.federation.loss_total or self._request.loss_after:
            return {client: measures[client].loss for client in step.reports}
        return {client: report.loss for client, report in step.reports.items()}

    def _commit(
        self,
        number: int,
        step: AggregatedStep,
        reports: Mapping[str, Report],
        factor: float | None,
    ) -> None:
        losses = {client: report.loss for client, report in reports.items()}
        self.participation.committed(reports)
        self.loss_history.committed(losses)
        self.last_reports.update({client: (number, loss) for client, loss in losses.items()})
        self.state = self.state if factor == 0.0 else step.state
        self.model, self._spare = self._spare, self.model

    # ---- evaluation ----------------------------------------------------------------------------

    def _is_evaluated(self, number: int) -> bool:
        every, version = self.federation.evaluate_every, number + 1
        return version == self.federation.rounds or bool(every and version % every == 0)

    def _evaluate(self, trainer: Trainer, measures: Measures) -> tuple[ClientScores, list[float]]:
        """Return the scores, and the training losses of the round's clients after the round."""
        with self.seconds.timed("evaluation"):
            if not np.isfinite(self.model.parameters).all():
                raise TaskFailed(f"in round {self.done} {NOT_FINITE}")
            scores = trainer.evaluate(self.evaluated_model())
            if self.personal:
                scores = scores._replace(personal=self.personal.accuracy(self.model))
            after = trainer.losses(self.model, [self._number[client] for client in measures])
            return scores, list(after)

    def evaluated_model(self) -> Model:
        """Return the model to evaluate: the newest one, or the mean of all so far."""
        if self.federation.judged == "average":
            return self.average.applied_to(self.model)
        return self.model

    def epsilon(self) -> float | None:
        """Return the epsilon of differential privacy spent so far; None without privacy."""
        if self._privacy is None:
            return None
        selections = [self._selection_size(number) for number in range(self.done)]
        return self._privacy.epsilon(
            self.participation.participations, selections, self._requested_evaluations()
        )

    def _selection_size(self, number: int) -> tuple[int, int]:
        """Return how many clients were selected in a round, and among how many."""
        present = len(self.behaviour.present(number))
        return min(self.federation.clients_per_round or present, present), present

    def _requested_evaluations(self) -> int:
        """Return how many evaluations a server would have requested of each client so far."""
        every = self.federation.evaluate_every
        if not every:
            return 0
        complete = self.done == self.federation.rounds
        return -(-self.done // every) if complete else self.done // every

    # ---- parts ---------------------------------------------------------------------------------

    def _new_privacy(self) -> SimulatedPrivacy | None:
        settings = self.federation.privacy
        if settings is None:
            return None
        if reason := model_refusal(self.model.signature):
            raise UsageError(f"this federation cannot be made private: {reason}")
        cohort = settings.cohort or self.federation.clients_per_round or len(self.data.names)
        return SimulatedPrivacy(settings, self.federation.recipe, cohort, self.federation.seed)

    def _with_noisy_labels(self, data: FleetData) -> FleetData:
        labels = [y.numpy() for y in data.train.y]
        return data.with_labels(self.behaviour.labels(labels, data.classes))

    def _row_count(self) -> int:
        return min(self.federation.clients_per_round or len(self._number), len(self._number))

    @contextmanager
    def _trainer(self) -> Iterator[Trainer]:
        workers = self.federation.workers or os.cpu_count() or 1
        trainer = trainer_for(self.federation, self.data, self.model, workers)
        try:
            yield trainer
        finally:
            trainer.close()

    def _new_history(self) -> History | None:
        if not uses_history(self.federation.recipe):
            return None
        clients, size = len(self._number), len(self.model.parameters)
        return History(self._layers, row_store_for(clients, size, self.federation.scratch))
