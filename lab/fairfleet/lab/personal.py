"""Ditto in a simulation: every client's personal model, trained by the network client's own code."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray
from torch import nn

from fairfleet.client.personal import first_personal, train_personal
from fairfleet.common.tensors import Model
from fairfleet.lab.cohort import FleetData, Work
from fairfleet.lab.sequential import client_tasks


class PersonalModels:
    """Beside the shared model, whichever engine trains that one."""

    def __init__(self, build: Callable[[], nn.Module], data: FleetData) -> None:
        self._tasks, _ = client_tasks(build, data)
        self.models: dict[int, Model] = {}  # of the clients that have taken part, by their numbers

    def train(self, received: Model, work: Sequence[Work]) -> None:
        for client, plan in work:
            if client not in self.models:
                self.models[client] = first_personal(received)
            train_personal(self._tasks[client], self.models[client], received, plan)

    def accuracy(self, shared: Model) -> NDArray[np.float64]:
        """Of every client, on its own test data; NaN where there are none.

        Whoever has not taken part yet is judged by the shared model, where its own would begin: figures of shared and
        personal models are over the same clients.
        """
        return np.array([self._accuracy(client, shared) for client in range(len(self._tasks))])

    def _accuracy(self, client: int, shared: Model) -> float:
        task = self._tasks[client]
        if not task.test_samples:
            return math.nan
        found = task.evaluate(self.models.get(client, shared).named()).accuracy
        return math.nan if found is None else found
