"""How long a round waits for its clients: a fixed time, or one learned from how long they took before."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

REMEMBERED = 500  # durations
ENOUGH = 10  # durations to learn from; with fewer the fixed deadline holds


def adaptive(durations: Sequence[float], *, longest: float, shortest: float, factor: float) -> float:
    """`factor` times what nine of ten past trainings took, within limits.

    >>> adaptive([2.0] * 20, longest=600, shortest=1, factor=3)
    6.0
    >>> adaptive([2.0] * 3, longest=600, shortest=1, factor=3)  # too few to learn from
    600
    """
    if len(durations) < ENOUGH:
        return longest
    usual = float(np.quantile(durations, 0.9))
    return min(longest, max(shortest, factor * usual))
