"""Local training of any model by the network client's own task, one client after another.

All clients share one module, so a fleet takes no more memory than its data.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fairfleet.client.task import Job
from fairfleet.client.torch import TorchTask
from fairfleet.client.training.torch_measures import NamedMeasures
from fairfleet.common.errors import UsageError
from fairfleet.common.reports import BUILT_IN, Evaluation
from fairfleet.common.tensors import Model, Section
from fairfleet.lab.simulation.trainer import (
    ClientScores,
    FleetData,
    Measured,
    Rows,
    TrainMeasures,
    TrainRequest,
    Work,
)

Pair = tuple[Tensor, Tensor]
MakeTask = Callable[[Pair, Pair | None], TorchTask]


def client_tasks(
    build: Callable[[], nn.Module], data: FleetData, measures: NamedMeasures | None = None
) -> tuple[list[TorchTask], MakeTask]:
    """Return every client's task, and a function that makes further tasks with the same module."""
    with torch.random.fork_rng(devices=[]):
        module = build()

    def make_task(train: Pair, test: Pair | None) -> TorchTask:
        return TorchTask(
            lambda: module,
            train=train,
            test=test,
            loss=cross_entropy,
            measures=measures,
            device="cpu",
        )

    clients = range(len(data.names))
    tests = [data.test.of(client) if data.test.count(client) else None for client in clients]
    tasks = [
        make_task(data.train.of(client), test) for client, test in zip(clients, tests, strict=True)
    ]
    return tasks, make_task


class SequentialTrainer:
    """A trainer for any model. Training, losses and evaluation are those of `TorchTask`."""

    def __init__(
        self,
        build: Callable[[], nn.Module],
        data: FleetData,
        threads: int,
        measure: str = "accuracy",
        measures: NamedMeasures | None = None,
    ) -> None:
        """Prepare to train; `measure` is one of `measures`, accuracy or loss."""
        self.data, self._measure = data, measure
        self._tasks, self._make_task = client_tasks(build, data, measures)
        self._states: list[Model] = []
        self._threads = torch.get_num_threads()
        torch.set_num_threads(threads)

    def close(self) -> None:
        """Restore torch's number of threads."""
        torch.set_num_threads(self._threads)

    def train(
        self, model: Model, work: Sequence[Work], request: TrainRequest, rows: Rows
    ) -> list[TrainMeasures]:
        """Train each client and write its update (received - trained) into its row."""
        self._states = []
        return [
            self._train(model, client_work, request, row)
            for client_work, row in zip(work, rows, strict=True)
        ]

    def states(self) -> list[Model]:
        """Return the models of the last call of `train` if they have buffers or counters."""
        return self._states

    def losses(self, model: Model, clients: Sequence[int]) -> list[float]:
        """Return the loss of each of these clients on its training data."""
        arrays, train = model.named(), self.data.train
        return [
            self._make_task(train.of(client), train.of(client)).training_loss(arrays)
            for client in clients
        ]

    def evaluate(self, model: Model) -> ClientScores:
        """Return the scores of every client on its own test data."""
        arrays = model.named()
        tasks = self._tasks
        evaluations = [task.evaluate(arrays) if task.test_samples else None for task in tasks]
        accuracy, loss = (_values(evaluations, name) for name in ("accuracy", "loss"))
        own = None if self._measure in BUILT_IN else _measured(evaluations, self._measure)
        return ClientScores(accuracy, loss, own=own)

    def _train(self, model: Model, work: Work, request: TrainRequest, row: Rows) -> TrainMeasures:
        trained = self._tasks[work.client].train(
            model.named(), Job(work.plan, request.gradient_norm)
        )
        after = Model.empty(model.signature)
        after.assign(trained.arrays)
        np.subtract(model.parameters, after.parameters, out=row)
        if model.signature.size(Section.BUFFERS) or model.signature.size(Section.COUNTERS):
            self._states.append(after)
        report = trained.report
        accuracy = math.nan if report.accuracy is None else report.accuracy
        return TrainMeasures(
            report.loss_before, accuracy, report.gradient_norm, report.steps, report.loss_after
        )


def _values(evaluations: Sequence[Evaluation | None], name: str) -> NDArray[np.float64]:
    """Return a measure per client; NaN for a client without it."""
    figures = [
        None if evaluation is None else evaluation.figure(name) for evaluation in evaluations
    ]
    return np.array([math.nan if value is None else value for value in figures])


def _measured(evaluations: Sequence[Evaluation | None], name: str) -> Measured:
    """Return a measure of the tasks' own. Raises UsageError if no client reports it."""
    reported = [evaluation.measures for evaluation in evaluations if evaluation is not None]
    direction = next((row[name].direction for row in reported if name in row), None)
    if direction is None:
        names = ", ".join(sorted({name for row in reported for name in row})) or "none"
        raise UsageError(f"no client reports {name}; the measures of the tasks are: {names}")
    return Measured(_values(evaluations, name), direction)
