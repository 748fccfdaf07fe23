"""A small model and stored updates for it."""

from __future__ import annotations

import numpy as np

from fairfleet.common.reports import TrainReport
from fairfleet.common.tensors import Model
from fairfleet.server.storage.store import StoredUpdate

CLIENTS = ("ann", "bob", "cem", "dia", "eve")


def initial() -> Model:
    weights = {"one.weight": np.ones((4, 5), np.float32), "one.bias": np.ones(4, np.float32)}
    return Model.of(
        weights, {"norm.running_mean": np.zeros(2, np.float32), "norm.count": np.array(0)}
    )


def updates_of(number: int, many: int = 3) -> dict[str, tuple[StoredUpdate, Model]]:
    """Return updates of three of five clients, other ones in each round, with conflicting rows."""
    draw = np.random.default_rng(number)
    updates = {}
    for client in sorted(draw.permutation(CLIENTS)[:many]):
        row = Model.empty(initial().signature)
        row.parameters[:] = draw.standard_normal(len(row.parameters))
        row.buffers[:] = draw.standard_normal(2)
        row.counters[:] = draw.integers(100)
        report = TrainReport(
            samples=int(draw.integers(1, 50)),
            loss_before=float(draw.uniform(0.1, 3)),
            loss_after=0.1,
            steps=5,
            learning_rate=0.1,
            gradient_norm=float(draw.uniform(1, 9)),
            initial_loss=2.5,
            accuracy=float(draw.uniform(0.1, 0.9)),
        )
        updates[str(client)] = (
            StoredUpdate(number, str(client), bytes(32), "raw32", 96, report, None),
            row,
        )
    return updates
