"""Client selection for a round: one small pure function per policy.

Each takes candidates, a count and a seed, and returns the selected clients. The same seed selects
the same clients, whatever the order of the candidates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

MOST_DOUBLINGS = 4  # of the cycles that a client waits after missed selections
Seed = tuple[int, ...]
Selection = Literal["uniform", "samples", "least_recent", "power_of_choice"]


@dataclass(frozen=True)
class Candidate:
    """A client that can be selected, and what the policies know about it."""

    client: str
    samples: int = 0
    last_round: int | None = None  # in which the client took part
    loss: float | None = None  # of the model on the client's data, as last reported
    last_selected: int | None = None  # a round, whether the client delivered or not
    # Since its last counted update, without those that turned out not to be needed.
    selections_missed: int = 0


def uniform(candidates: Sequence[Candidate], count: int, seed: Seed) -> frozenset[str]:
    """Select clients with equal probability."""
    return _drawn(candidates, count, seed, None)


def by_samples(candidates: Sequence[Candidate], count: int, seed: Seed) -> frozenset[str]:
    """Select in proportion to sample counts, without replacement; those without samples last."""
    with_samples = [candidate for candidate in candidates if candidate.samples]
    weights = np.array([candidate.samples for candidate in _sorted(with_samples)], np.float64)
    chosen = _drawn(with_samples, count, seed, weights)
    rest = [candidate for candidate in candidates if not candidate.samples]
    return chosen | _drawn(rest, count - len(chosen), seed, None) if len(chosen) < count else chosen


def least_recent(candidates: Sequence[Candidate], count: int, seed: Seed) -> frozenset[str]:
    """Select the clients that were not selected for longest, newcomers first; ties at random.

    A client that missed its last two selections or more waits 1, 3, 7 or 15 cycles longer, where a
    cycle is the number of rounds until every client is selected once. `attendance` keeps count.
    """
    order = np.random.default_rng(seed).permutation(len(candidates))
    cycle = -(-len(candidates) // max(1, count))
    pairs = zip(_sorted(candidates), order, strict=True)
    queue = sorted(pairs, key=lambda pair: (_waits_since(pair[0], cycle), pair[1]))
    return frozenset(candidate.client for candidate, _ in queue[:count])


def power_of_choice(
    candidates: Sequence[Candidate], count: int, seed: Seed, *, factor: float = 2.0
) -> frozenset[str]:
    """Draw `factor` times as many by samples, and select those with the highest loss.

    An unknown loss counts as the highest, so that newcomers are selected (Cho et al. 2020).
    """
    drawn = by_samples(candidates, int(np.ceil(factor * count)), seed)
    order = np.random.default_rng(seed).permutation(len(candidates))
    pairs = [
        pair for pair in zip(_sorted(candidates), order, strict=True) if pair[0].client in drawn
    ]
    ranked = sorted(
        pairs, key=lambda pair: (-np.inf if pair[0].loss is None else -pair[0].loss, pair[1])
    )
    return frozenset(candidate.client for candidate, _ in ranked[:count])


POLICIES: dict[Selection, Callable[[Sequence[Candidate], int, Seed], frozenset[str]]] = {
    "uniform": uniform,
    "samples": by_samples,
    "least_recent": least_recent,
    "power_of_choice": power_of_choice,
}


def _sorted(candidates: Sequence[Candidate]) -> list[Candidate]:
    return sorted(candidates, key=lambda candidate: candidate.client)


def _waits_since(candidate: Candidate, cycle: int) -> int:
    """Return the round since which a client counts as waiting.

    This is later than its last round if the client has missed selections.
    """
    rounds = (candidate.last_selected, candidate.last_round)
    last = max((number for number in rounds if number is not None), default=-1)
    missed = max(0, candidate.selections_missed - 1)  # the first one has no consequence
    return last + ((1 << min(missed, MOST_DOUBLINGS)) - 1) * cycle


def _drawn(
    candidates: Sequence[Candidate], count: int, seed: Seed, weights: np.ndarray | None
) -> frozenset[str]:
    ordered = _sorted(candidates)
    if count >= len(ordered):
        return frozenset(candidate.client for candidate in ordered)
    shares = None if weights is None else weights / weights.sum()
    indices = np.random.default_rng(seed).choice(len(ordered), count, replace=False, p=shares)
    return frozenset(ordered[index].client for index in indices)
