"""Which samples each solver step sees: a function of the plan alone, so every task draws the same batches.

Leans on numpy only. A repeat of the same plan on the same number of samples gives the same batches.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from fairfleet.common.plan import Plan

Indices = NDArray[np.intp]


def batches(plan: Plan, samples: int) -> Iterator[Indices]:
    """The indices of each step's samples, `plan.steps_for(samples)` times; every epoch has an order of its own."""
    return islice(_endless(plan, samples), plan.steps_for(samples))


def _endless(plan: Plan, samples: int) -> Iterator[Indices]:
    random = np.random.default_rng(plan.seed)
    count = plan.batches_in_epoch(samples)
    starts = [plan.batch_size * step for step in range(count)]
    while starts:  # without samples there is no batch to draw
        order = random.permutation(samples)
        for start, end in zip(starts, [*starts[1:], samples], strict=True):
            yield order[start:end]


def in_order(samples: int, size: int) -> Iterator[Indices]:
    """Every sample once, first to last, for a pass that measures."""
    for start in range(0, samples, size):
        yield np.arange(start, min(start + size, samples))
