"""Who takes part in a round: one small pure function per policy.

Each gets candidates, how many are wanted and a seed, and gives the chosen; the same seed draws the same clients,
whatever order the candidates come in.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

Seed = tuple[int, ...]
Selection = Literal["uniform", "samples", "least_recent", "power_of_choice"]


@dataclass(frozen=True)
class Candidate:
    client: str
    samples: int = 0
    last_round: int | None = None  # that it took part in
    loss: float | None = None  # of the model on its data, as last reported


def uniform(candidates: Sequence[Candidate], count: int, seed: Seed) -> frozenset[str]:
    """Each as likely as any other."""
    return _drawn(candidates, count, seed, None)


def by_samples(candidates: Sequence[Candidate], count: int, seed: Seed) -> frozenset[str]:
    """In proportion to the number of samples, without replacement. Those without samples come last."""
    with_samples = [candidate for candidate in candidates if candidate.samples]
    weights = np.array([candidate.samples for candidate in _sorted(with_samples)], np.float64)
    chosen = _drawn(with_samples, count, seed, weights)
    rest = [candidate for candidate in candidates if not candidate.samples]
    return chosen | _drawn(rest, count - len(chosen), seed, None) if len(chosen) < count else chosen


def least_recent(candidates: Sequence[Candidate], count: int, seed: Seed) -> frozenset[str]:
    """Who has waited longest, newcomers first; among equals by lot."""
    lots = np.random.default_rng(seed).permutation(len(candidates))
    queue = sorted(zip(_sorted(candidates), lots, strict=True), key=lambda pair: (_waited_since(pair[0]), pair[1]))
    return frozenset(candidate.client for candidate, _ in queue[:count])


def power_of_choice(candidates: Sequence[Candidate], count: int, seed: Seed, *, factor: float = 2.0) -> frozenset[str]:
    """Draws `factor` times as many in proportion to samples, and takes those whose loss is highest (Cho et al. 2020).

    A loss that is not known counts as the highest of all: somebody new is worth asking.
    """
    drawn = by_samples(candidates, int(np.ceil(factor * count)), seed)
    lots = np.random.default_rng(seed).permutation(len(candidates))
    pairs = [pair for pair in zip(_sorted(candidates), lots, strict=True) if pair[0].client in drawn]
    ranked = sorted(pairs, key=lambda pair: (-np.inf if pair[0].loss is None else -pair[0].loss, pair[1]))
    return frozenset(candidate.client for candidate, _ in ranked[:count])


POLICIES: dict[Selection, Callable[[Sequence[Candidate], int, Seed], frozenset[str]]] = {
    "uniform": uniform,
    "samples": by_samples,
    "least_recent": least_recent,
    "power_of_choice": power_of_choice,
}


def _sorted(candidates: Sequence[Candidate]) -> list[Candidate]:
    return sorted(candidates, key=lambda candidate: candidate.client)


def _waited_since(candidate: Candidate) -> int:
    return -1 if candidate.last_round is None else candidate.last_round


def _drawn(candidates: Sequence[Candidate], count: int, seed: Seed, weights: np.ndarray | None) -> frozenset[str]:
    ordered = _sorted(candidates)
    if count >= len(ordered):
        return frozenset(candidate.client for candidate in ordered)
    shares = None if weights is None else weights / weights.sum()
    places = np.random.default_rng(seed).choice(len(ordered), count, replace=False, p=shares)
    return frozenset(ordered[place].client for place in places)
