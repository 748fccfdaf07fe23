"""Local training by the network client's own task, one client after another: for any model.

All clients share one module and take turns in it, so a fleet takes no more memory than its data.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fairfleet.client.task import Job
from fairfleet.client.torch import TorchTask
from fairfleet.common.tensors import Model, Section
from fairfleet.lab.cohort import FleetData, Measured, Rows, Served, Wanted, Work

Pair = tuple[Tensor, Tensor]
MakeTask = Callable[[Pair, Pair | None], TorchTask]


def client_tasks(build: Callable[[], nn.Module], data: FleetData) -> tuple[list[TorchTask], MakeTask]:
    """Every client's task, and a maker of others that take turns in the same module."""
    with torch.random.fork_rng(devices=[]):
        module = build()

    def task(train: Pair, test: Pair | None) -> TorchTask:
        return TorchTask(lambda: module, train=train, test=test, loss=cross_entropy, device="cpu")

    clients = range(len(data.names))
    tests = [data.test.of(client) if data.test.count(client) else None for client in clients]
    return [task(data.train.of(client), test) for client, test in zip(clients, tests, strict=True)], task


class SequentialTrainer:
    def __init__(self, build: Callable[[], nn.Module], data: FleetData, threads: int) -> None:
        self.data = data
        self._tasks, self._task = client_tasks(build, data)
        self._states: list[Model] = []
        self._threads = torch.get_num_threads()
        torch.set_num_threads(threads)

    def close(self) -> None:
        torch.set_num_threads(self._threads)

    def train(self, model: Model, work: Sequence[Work], wanted: Wanted, rows: Rows) -> list[Measured]:
        self._states = []
        return [self._train(model, one, wanted, row) for one, row in zip(work, rows, strict=True)]

    def states(self) -> list[Model]:
        return self._states

    def losses(self, model: Model, clients: Sequence[int]) -> list[float]:
        arrays, train = model.named(), self.data.train
        return [self._task(train.of(client), train.of(client)).evaluate(arrays).loss for client in clients]

    def evaluate(self, model: Model) -> Served:
        arrays, able = model.named(), [task for task in self._tasks if task.test_samples]
        found = {id(task): task.evaluate(arrays) for task in able}
        pairs = [
            (one.accuracy, one.loss) if (one := found.get(id(task))) else (math.nan, math.nan) for task in self._tasks
        ]
        return Served(*np.array(pairs, dtype=np.float64).T)

    def _train(self, model: Model, work: Work, wanted: Wanted, row: Rows) -> Measured:
        trained = self._tasks[work.client].train(model.named(), Job(work.plan, wanted.gradient_norm))
        after = Model.empty(model.signature)
        after.assign(trained.arrays)
        np.subtract(model.parameters, after.parameters, out=row)
        if model.signature.size(Section.BUFFERS) or model.signature.size(Section.COUNTERS):
            self._states.append(after)
        report = trained.report
        accuracy = math.nan if report.accuracy is None else report.accuracy
        return Measured(report.loss_before, accuracy, report.gradient_norm, report.steps, report.loss_after)
