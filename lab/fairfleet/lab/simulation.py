"""A federation in one process: the server's own core and the client's own training, without the network between.

Selection, plans, batches, aggregation, history and optimizer are the very ones of `fairfleet server` and
`fairfleet client`, so that the same seeds give the same model. A run is a sequence of rounds that anyone can watch;
it may be left after any of them.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

from fairfleet.common.errors import TaskFailed, UsageError
from fairfleet.common.tensors import Model, Vector
from fairfleet.lab.behaviour import Conduct
from fairfleet.lab.coding import Coded, Coding
from fairfleet.lab.cohort import FleetData, Measured, Served, Trainer, Wanted, Work
from fairfleet.lab.federation import Federation, RoundTold, initial_model, plan_of, trainer_for
from fairfleet.lab.personal import PersonalModels
from fairfleet.lab.private import Private
from fairfleet.lab.shelves import shelf_for
from fairfleet.lab.verified import take_verified, wanted_trials
from fairfleet.server.admission import Finding, Gate, Watched
from fairfleet.server.aggregation import Aggregation, ServerState, Taken
from fairfleet.server.committing import layer_sizes, merge_state, uses_history
from fairfleet.server.history import History
from fairfleet.server.privacy import model_refusal
from fairfleet.server.rules import Report
from fairfleet.server.selection import POLICIES, Candidate
from fairfleet.server.verification import Losses, Terms

DIVERGED = "training diverged. Try a smaller learning_rate in the plan, or a smaller eta of the rule's optimizer."


@dataclass
class Seconds:
    """Where the time went."""

    training: float = 0.0
    aggregation: float = 0.0
    evaluation: float = 0.0


class Simulation:
    """`rounds()` runs it; the newest model is `model` at any time."""

    def __init__(self, federation: Federation) -> None:
        self.federation, self.seconds = federation, Seconds()
        data = FleetData.of(federation.clients)
        self.conduct = Conduct(federation.behaviour, data.names, federation.seed)
        self.model = copied(federation.initial or initial_model(federation.model, federation.seed))
        self.data = self._as_taught(data)
        self.plan = plan_of(federation.plan, federation.recipe)
        self._private = self._privacy()
        self._layers = layer_sizes(self.model.signature)
        self._number = {name: number for number, name in enumerate(data.names)}
        self.personal = PersonalModels(federation.model, self.data) if self.plan.personal_lambda else None
        self.done = 0  # rounds
        self.state = ServerState()
        self.first_losses: dict[str, float] = {}
        self.participations: dict[str, int] = {}
        self.coding = Coding(federation.codec, federation.error_feedback, federation.prediction)
        self.last_reports: dict[str, tuple[int, float]] = {}  # by client: the round, and the loss it told
        self.watched = Watched()
        self.average = Average()
        self.history = self._new_history()
        self._spare = Model.empty(self.model.signature)
        needed = federation.recipe.rule.needs().reports
        self._wanted = Wanted("gradient_norm" in needed, federation.loss == "after")

    def rounds(self) -> Iterator[RoundTold]:
        """From where it is to the end."""
        with self._trainer() as trainer, threadpool_limits(1, "blas"):
            rows = np.empty((self._places(), len(self.model.parameters)), np.float32)
            while self.done < self.federation.rounds:
                told = self._round(self.done, trainer, rows)
                self.done += 1
                yield told

    # ---- one round -----------------------------------------------------------------------------

    def _round(self, number: int, trainer: Trainer, rows: Vector) -> RoundTold:
        here = sorted(client for client in self._asked(number) if self.conduct.delivers(client, number))
        measured, coded, diagnostics, factor = list[Measured](), None, None, None
        counted, findings = tuple[str, ...](), tuple[Finding, ...]()
        if here:
            measured, coded = self._train(trainer, number, here, rows)
            taken, factor = self._aggregate(trainer, number, here, measured, rows)
            counted, diagnostics, findings = tuple(taken.reports), taken.diagnostics, taken.findings
        if self.federation.judged == "average":
            self.average.add(self.model.parameters)
        loss = float(np.mean([one.loss for one in measured])) if measured else math.nan
        if not self._is_evaluated(number):
            return RoundTold(number, counted, loss, diagnostics, factor=factor, findings=findings, coded=coded)
        served, improved = self._evaluate(trainer, here, measured)
        return RoundTold(number, counted, loss, diagnostics, served, improved, factor, findings, coded)

    def _asked(self, number: int) -> frozenset[str]:
        """Drawn as the server draws at its first attempt."""
        candidates = [self._candidate(client) for client in self.conduct.present(number)]
        count = self.federation.clients_per_round or len(candidates)
        return POLICIES[self.federation.selection](candidates, count, (self.federation.seed, number, 0))

    def _candidate(self, client: str) -> Candidate:
        last, loss = self.last_reports.get(client, (None, None))
        return Candidate(client, self.data.train.count(self._number[client]), last, loss)

    def _train(
        self, trainer: Trainer, number: int, here: Sequence[str], rows: Vector
    ) -> tuple[list[Measured], Coded | None]:
        """Fills the rows with what the server receives: changed by attackers, and by the codec."""
        began = time.perf_counter()
        plan = self.plan
        if self.federation.learning_rate_decay != 1.0:
            rate = plan.learning_rate * self.federation.learning_rate_decay**number
            plan = plan.model_copy(update={"learning_rate": rate})
        work = [Work(self._number[client], self.conduct.plan(plan, client, number)) for client in here]
        updates = rows[: len(here)]
        measured = trainer.train(self.model, work, self._wanted, updates)
        self._check(number, here, measured)
        if self.personal:
            self.personal.train(self.model, work)
        for row, client, one in zip(updates, here, work, strict=True):
            if self._private:
                self._private.send(row, self.model.parameters, one.client, number)
            if (factor := self.conduct.factor(client, number)) != 1.0:
                np.multiply(row, np.float32(factor), out=row)
        coded = self.coding.send(here, updates, [one.plan.seed for one in work])
        self.seconds.training += time.perf_counter() - began
        return measured, coded

    def _aggregate(
        self, trainer: Trainer, number: int, here: Sequence[str], measured: Sequence[Measured], rows: Vector
    ) -> tuple[Taken, float | None]:
        """As the server's committer does it; also which part of the step was taken, if it was tried before."""
        began = time.perf_counter()
        updates, recipe = dict(zip(here, rows, strict=False)), self.federation.recipe
        disguised = self._private.disguised(number) if self._private else None
        if disguised:
            disguised.clip(updates.values())
        gate = Gate(self.federation.admission, self.watched)
        aggregation = Aggregation(recipe, self._layers, round=number, history=self.history, expected=here, gate=gate)
        aggregation.extend(updates)
        rate = self.plan.learning_rate * self.federation.learning_rate_decay**number
        reports = {client: self._report(client, number, one, rate) for client, one in zip(here, measured, strict=True)}
        disguise = disguised.disguise if disguised else None
        taken = aggregation.step(reports, self.state, out=self._spare.parameters, disguise=disguise)
        if states := trainer.states():
            of_clients = dict(zip(here, states, strict=True))
            samples = [report.samples for report in taken.reports.values()]
            merge_state(self._spare, samples, [of_clients[client] for client in taken.reports])
        factor = self._take(taken, trainer, self._compared(taken, dict(zip(here, measured, strict=True))))
        aggregation.remember({client: updates[client] for client in taken.reports}, reports)
        self.watched.committed({client: report.loss for client, report in reports.items()})
        self.last_reports.update({client: (number, report.loss) for client, report in reports.items()})
        self.state = self.state if factor == 0.0 else taken.state
        self.model, self._spare = self._spare, self.model
        self.seconds.aggregation += time.perf_counter() - began
        return taken, factor

    def _take(self, taken: Taken, trainer: Trainer, losses: Losses) -> float | None:
        """Makes the spare model, which holds the step, the next one; which part of it, if that was tried."""
        terms = self.federation.verification
        trials = wanted_trials(taken, terms)
        if trials is None:
            np.subtract(self.model.parameters, taken.vector, out=self._spare.parameters)
            return None
        return take_verified(self.model, self._spare, taken, trials, terms or Terms(), trainer, losses)

    def _compared(self, taken: Taken, measured: Mapping[str, Measured]) -> Losses:
        """The losses that trials are held against: those that were told and admitted, as on the server.

        A sum over samples, or a loss after training, is for the rule alone: no trial could be compared with it.
        """
        if self.federation.loss_total or self._wanted.loss_after:
            return {client: measured[client].loss for client in taken.reports}
        return {client: report.loss for client, report in taken.reports.items()}

    def _report(self, client: str, number: int, measured: Measured, rate: float) -> Report:
        samples = self.data.train.count(self._number[client])
        if self._private:
            measured = self._private.report(measured, self._number[client], number)
            samples = 1 if self._private.hides_samples else samples
        heard = measured.loss_after if self._wanted.loss_after and measured.loss_after is not None else measured.loss
        told = self.conduct.reported(heard, client, number)  # a lie is about the mean, as in FedMGDA+'s own code
        loss = told * samples if self.federation.loss_total else told
        first = self.first_losses.setdefault(client, loss)
        self.participations[client] = self.participations.get(client, 0) + 1
        return Report(
            samples=samples,
            loss=loss,
            first_loss=first,
            accuracy=measured.accuracy,
            participations=self.participations[client],
            steps=measured.steps,
            gradient_norm=measured.gradient_norm,
            local_lr=rate,
        )

    def _check(self, number: int, here: Sequence[str], measured: Sequence[Measured]) -> None:
        for client, one in zip(here, measured, strict=True):
            if not math.isfinite(one.loss):
                raise TaskFailed(f"in round {number} the loss of {client} is {one.loss}: {DIVERGED}")

    # ---- evaluation ----------------------------------------------------------------------------

    def _is_evaluated(self, number: int) -> bool:
        every, version = self.federation.evaluate_every, number + 1
        return version == self.federation.rounds or bool(every and version % every == 0)

    def _evaluate(
        self, trainer: Trainer, here: Sequence[str], measured: Sequence[Measured]
    ) -> tuple[Served, float | None]:
        began = time.perf_counter()
        if not np.isfinite(self.model.parameters).all():
            raise TaskFailed(f"in round {self.done} the model got values that are no numbers: {DIVERGED}")
        served = trainer.evaluate(self.judged_model())
        if self.personal:
            served = served._replace(personal=self.personal.accuracy(self.model))
        after = trainer.losses(self.model, [self._number[client] for client in here])
        falls = [now < one.loss for now, one in zip(after, measured, strict=True)]
        self.seconds.evaluation += time.perf_counter() - began
        return served, float(np.mean(falls)) if falls else None

    def epsilon(self) -> float | None:
        """Of differential privacy, spent so far; None where there is none."""
        if self._private is None:
            return None
        lots = [self._lot(number) for number in range(self.done)]
        every, done = self.federation.evaluate_every, self.done
        asked = -(-done // every) if every and done == self.federation.rounds else done // every if every else 0
        return self._private.epsilon(self.participations, lots, asked)

    def _lot(self, number: int) -> tuple[int, int]:
        """How many were drawn in a round, among how many."""
        present = len(self.conduct.present(number))
        return min(self.federation.clients_per_round or present, present), present

    def judged_model(self) -> Model:
        """The newest, or the mean of all so far."""
        return self.average.of(self.model) if self.federation.judged == "average" else self.model

    # ---- parts ---------------------------------------------------------------------------------

    def _privacy(self) -> Private | None:
        wanted = self.federation.privacy
        if wanted is None:
            return None
        if why := model_refusal(self.model.signature):
            raise UsageError(f"privacy cannot be had here: {why}")
        cohort = wanted.cohort or self.federation.clients_per_round or len(self.data.names)
        return Private(wanted, self.federation.recipe, cohort, self.federation.seed)

    def _as_taught(self, data: FleetData) -> FleetData:
        labels = [y.numpy() for y in data.train.y]
        return data.with_labels(self.conduct.labels(labels, data.classes))

    def _places(self) -> int:
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
        shelf = shelf_for(len(self._number), len(self.model.parameters), self.federation.scratch)
        return History(self._layers, shelf)


class Average:
    """The mean of the models so far, summed in float64."""

    def __init__(self) -> None:
        self.total: NDArray[np.float64] | None = None
        self.count = 0

    def add(self, parameters: Vector) -> None:
        if self.total is None:
            self.total = np.zeros(len(parameters))
        self.total += parameters
        self.count += 1

    def of(self, model: Model) -> Model:
        averaged = copied(model)
        if self.total is not None:
            averaged.parameters[:] = self.total / self.count
        return averaged


def copied(model: Model) -> Model:
    """With memory of its own: rounds write over the models before them."""
    return Model(model.signature, model.parameters.copy(), model.buffers.copy(), model.counters.copy())
