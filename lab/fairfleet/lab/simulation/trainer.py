"""The interface between a simulated round and local training: requests, updates and reports.

Two trainers do the same work. `sequential_trainer` runs the network client's own task, one client
after another. `batched_trainer` trains many small models at a time and agrees with it to within
rounding.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fairfleet.common.errors import TaskFailed, UsageError
from fairfleet.common.reports import Better
from fairfleet.common.tensors import Model
from fairfleet.common.training_plan import Plan
from fairfleet.lab.datasets.client_data import ClientData

DIVERGED = (
    "training diverged. Try a smaller learning_rate in the plan, or a smaller eta of the rule's "
    "optimizer."
)
NOT_FINITE = f"the model has values that are not finite: {DIVERGED}"

Rows = NDArray[np.float32]  # one row per client, as long as the model


class ClientSamples(NamedTuple):
    """Each client's samples, by the client's number."""

    x: tuple[Tensor, ...]
    y: tuple[Tensor, ...]

    def of(self, client: int) -> tuple[Tensor, Tensor]:
        """Return the inputs and labels of a client."""
        return self.x[client], self.y[client]

    def count(self, client: int) -> int:
        """Return the number of samples of a client."""
        return len(self.y[client])


@dataclass(frozen=True)
class FleetData:
    """The samples of all clients as tensors that share the memory of the clients' arrays."""

    names: tuple[str, ...]  # in order: a client's index is its number
    train: ClientSamples
    test: ClientSamples

    @classmethod
    def of(cls, clients: Sequence[ClientData]) -> FleetData:
        """Return the data of these clients, in the order of their names.

        Raise UsageError if two clients share a name or one has no training samples.
        """
        ordered = sorted(clients, key=lambda client: client.name)
        names = tuple(client.name for client in ordered)
        if not names or len(set(names)) != len(names):
            raise UsageError(
                f"found {len(names)} clients with {len(set(names))} different names; "
                "give at least one client, and each a name of its own"
            )
        if empty := [client.name for client in ordered if not len(client.train_y)]:
            raise UsageError(
                f"clients without training samples: {', '.join(empty[:5])}; leave them out"
            )
        train = _samples([c.train_x for c in ordered], [c.train_y for c in ordered])
        return cls(names, train, _samples([c.test_x for c in ordered], [c.test_y for c in ordered]))

    @property
    def classes(self) -> int:
        """The number of classes: the highest label plus one."""
        return 1 + max(int(y.max()) for y in (*self.train.y, *self.test.y) if len(y))

    def with_labels(self, labels: Sequence[NDArray[np.int64]]) -> FleetData:
        """Return the same fleet with other training labels."""
        return replace(self, train=self.train._replace(y=tuple(map(torch.from_numpy, labels))))


def _samples(x: Sequence[NDArray[Any]], y: Sequence[NDArray[Any]]) -> ClientSamples:
    return ClientSamples(
        tuple(_tensor(array) for array in x), tuple(_tensor(array).long() for array in y)
    )


def _tensor(array: NDArray[Any]) -> Tensor:
    # Torch accepts neither arrays with negative strides nor read-only ones; only such are copied.
    return torch.from_numpy(np.require(array, requirements=["C", "W"]))


class Work(NamedTuple):
    """One client's training in one round; the plan has the client's own seed."""

    client: int
    plan: Plan


class TrainMeasures(NamedTuple):
    """What a client reports with its update: the values of `TrainReport` that some rule reads."""

    loss: float  # of the received model, on the training data
    accuracy: float
    gradient_norm: float | None
    steps: int
    loss_after: float | None = None  # of the trained model, if it was requested
    initial_loss: float | None = None  # of the initial model, if the rule lacks it


def check_finite(round_number: int, measures: Mapping[str, TrainMeasures]) -> None:
    """Raise TaskFailed, which names the client, if a loss is not finite."""
    for client, measured in measures.items():
        if not math.isfinite(measured.loss):
            raise TaskFailed(
                f"in round {round_number} the loss of {client} is {measured.loss}: {DIVERGED}"
            )


class TrainRequest(NamedTuple):
    """Which optional measures the clients are to report."""

    gradient_norm: bool = False
    loss_after: bool = False


class Measured(NamedTuple):
    """One measure of the tasks' own, per client; NaN for a client without it."""

    values: NDArray[np.float64]
    direction: Better


class ClientScores(NamedTuple):
    """One value per client; NaN for a client without test samples."""

    accuracy: NDArray[np.float64]
    loss: NDArray[np.float64]
    # Accuracy of each client's personal model, if the plan trains such models.
    personal: NDArray[np.float64] | None = None
    # The federation's measure, if it is neither of the first two.
    own: Measured | None = None


class Trainer(Protocol):
    """Local training and evaluation of a fleet's clients."""

    data: FleetData

    def train(
        self, model: Model, work: Sequence[Work], request: TrainRequest, rows: Rows
    ) -> list[TrainMeasures]:
        """Train each client and write its update (received - trained) into its row."""

    def states(self) -> list[Model]:
        """Return the clients' models after the last training, in the order of the work.

        The list is empty for models without buffers and counters.
        """

    def losses(self, model: Model, clients: Sequence[int]) -> list[float]:
        """Return the loss of each of these clients on its training data."""

    def evaluate(self, model: Model) -> ClientScores:
        """Return the scores of every client on its own test data."""

    def close(self) -> None:
        """Free the threads, and restore torch's number of threads."""
