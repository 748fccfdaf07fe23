"""What a simulated round asks of local training, and what it gets: rows of updates, and reports.

Two trainers do the same work. `sequential` runs the network client's own task, client after client; `batched` trains
many small models at a time and agrees with it to within rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fairfleet.common.errors import UsageError
from fairfleet.common.plan import Plan
from fairfleet.common.tensors import Model
from fairfleet.lab.clients import ClientData

Rows = NDArray[np.float32]  # one line per client, as long as the model


class Samples(NamedTuple):
    """Each client's samples, by the client's number."""

    x: tuple[Tensor, ...]
    y: tuple[Tensor, ...]

    def of(self, client: int) -> tuple[Tensor, Tensor]:
        return self.x[client], self.y[client]

    def count(self, client: int) -> int:
        return len(self.y[client])


@dataclass(frozen=True)
class FleetData:
    """The clients' own arrays as tensors, not copied."""

    names: tuple[str, ...]  # in order: a client's place here is its number
    train: Samples
    test: Samples

    @classmethod
    def of(cls, clients: Sequence[ClientData]) -> FleetData:
        ordered = sorted(clients, key=lambda client: client.name)
        names = tuple(client.name for client in ordered)
        if not names or len(set(names)) != len(names):
            raise UsageError(f"found {len(names)} clients with {len(set(names))} names; each needs a name of its own")
        if empty := [client.name for client in ordered if not len(client.train_y)]:
            raise UsageError(f"clients without training samples: {', '.join(empty[:5])}; leave them out")
        train = _samples([c.train_x for c in ordered], [c.train_y for c in ordered])
        return cls(names, train, _samples([c.test_x for c in ordered], [c.test_y for c in ordered]))

    @property
    def classes(self) -> int:
        return 1 + max(int(y.max()) for y in (*self.train.y, *self.test.y) if len(y))

    def with_labels(self, labels: Sequence[NDArray[np.int64]]) -> FleetData:
        """The same fleet, taught other labels."""
        return replace(self, train=self.train._replace(y=tuple(map(torch.from_numpy, labels))))


def _samples(x: Sequence[NDArray[Any]], y: Sequence[NDArray[Any]]) -> Samples:
    # torch knows neither turned nor read-only arrays; only such are copied
    plain = [[torch.from_numpy(np.require(one, requirements=["C", "W"])) for one in part] for part in (x, y)]
    return Samples(tuple(plain[0]), tuple(one.long() for one in plain[1]))


class Work(NamedTuple):
    """One client's training in one round; the plan's seed is its own."""

    client: int
    plan: Plan


class Measured(NamedTuple):
    """What a client reports beside its update: the values of `TrainReport` that some rule reads."""

    loss: float  # of the received model, on the training data
    accuracy: float
    gradient_norm: float | None
    steps: int
    loss_after: float | None = None  # of the trained one, where it was asked for


class Wanted(NamedTuple):
    gradient_norm: bool = False
    loss_after: bool = False


class Served(NamedTuple):
    """One value per client; NaN for a client without test samples."""

    accuracy: NDArray[np.float64]
    loss: NDArray[np.float64]
    personal: NDArray[np.float64] | None = None  # accuracy of each client's personal model, where the plan has such


class Trainer(Protocol):
    data: FleetData

    def train(self, model: Model, work: Sequence[Work], wanted: Wanted, rows: Rows) -> list[Measured]:
        """Fills one row (received - trained) for each piece of work."""

    def states(self) -> list[Model]:
        """The clients' models after the last training, in the order of the work, where they have buffers; else none."""

    def losses(self, model: Model, clients: Sequence[int]) -> list[float]:
        """On the clients' training data."""

    def evaluate(self, model: Model) -> Served:
        """Every client on its own test data."""

    def close(self) -> None: ...
