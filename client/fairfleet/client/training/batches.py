"""The samples that each solver step sees.

The batches depend only on the plan and the number of samples, so every task draws the same ones,
and a repeated training sees them again. This module needs numpy only.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from fairfleet.common.training_plan import Plan

Indices = NDArray[np.intp]


def batches(plan: Plan, samples: int) -> Iterator[Indices]:
    """Yield the indices of the samples of each step, `plan.steps_for(samples)` times.

    Every epoch has its own order.
    """
    return islice(_endless_batches(plan, samples), plan.steps_for(samples))


def _endless_batches(plan: Plan, samples: int) -> Iterator[Indices]:
    random = np.random.default_rng(plan.seed)
    count = plan.batches_in_epoch(samples)
    starts = [plan.batch_size * step for step in range(count)]
    while starts:  # without samples there is no batch to draw
        order = random.permutation(samples)
        for start, end in zip(starts, [*starts[1:], samples], strict=True):
            yield order[start:end]


def sequential_batches(samples: int, size: int) -> Iterator[Indices]:
    """Yield every sample once, from first to last, for a pass that only measures."""
    for start in range(0, samples, size):
        yield np.arange(start, min(start + size, samples))
