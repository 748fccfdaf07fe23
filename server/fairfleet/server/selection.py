"""Who takes part in a round. Pure functions of the candidates and a seed; the same seed draws the same clients."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np


def uniform(candidates: Iterable[str], count: int, seed: tuple[int, ...]) -> frozenset[str]:
    """`count` of the candidates, each as likely as any other; 0 takes all."""
    ordered = sorted(candidates)
    if not count or count >= len(ordered):
        return frozenset(ordered)
    drawn = np.random.default_rng(seed).choice(len(ordered), count, replace=False)
    return frozenset(ordered[i] for i in drawn)
