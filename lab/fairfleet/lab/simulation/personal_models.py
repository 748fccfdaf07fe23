"""Ditto in a simulation: trains a personal model per client with the client's own code."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray
from torch import nn

from fairfleet.client.training.personal_model import first_personal, train_personal
from fairfleet.common.tensors import Model
from fairfleet.lab.simulation.sequential_trainer import client_tasks
from fairfleet.lab.simulation.trainer import FleetData, Work


class PersonalModels:
    """The clients' personal models. They do not depend on the engine of the shared model."""

    def __init__(self, build: Callable[[], nn.Module], data: FleetData) -> None:
        self._tasks, _ = client_tasks(build, data)
        # By client number, for the clients that have taken part.
        self.models: dict[int, Model] = {}

    def train(self, received: Model, work: Sequence[Work]) -> None:
        """Train the personal models of the round's clients towards the received model."""
        for client, plan in work:
            if client not in self.models:
                self.models[client] = first_personal(received)
            train_personal(self._tasks[client], self.models[client], received, plan)

    def accuracy(self, shared: Model) -> NDArray[np.float64]:
        """Return every client's accuracy on its own test data; NaN for clients without any.

        A client that has not taken part yet is scored with the shared model, from which its own
        would begin. So the figures of shared and personal models cover the same clients.
        """
        return np.array([self._accuracy(client, shared) for client in range(len(self._tasks))])

    def _accuracy(self, client: int, shared: Model) -> float:
        task = self._tasks[client]
        if not task.test_samples:
            return math.nan
        accuracy = task.evaluate(self.models.get(client, shared).named()).accuracy
        return math.nan if accuracy is None else accuracy
