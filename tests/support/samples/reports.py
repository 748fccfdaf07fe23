"""Reports with every field that a rule may need."""

from __future__ import annotations

import numpy as np

from fairfleet.server.rules import Report


def some_report(rng: np.random.Generator) -> Report:
    return Report(
        samples=int(rng.integers(10, 500)),
        loss=float(rng.uniform(0.1, 3.0)),
        first_loss=float(rng.uniform(2.0, 3.0)),
        accuracy=float(rng.uniform(0.1, 0.9)),
        participations=int(rng.integers(1, 9)),
        steps=int(rng.integers(1, 30)),
        gradient_norm=float(rng.uniform(1.0, 20.0)),
        local_lr=0.01,
    )
