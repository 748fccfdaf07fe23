"""Finds the updates to leave out of a round that cannot be aggregated.

When aggregation fails or gives a non-finite model, it is tried again without the history's rows,
then without some of the updates. If a single update is the cause, exactly that one is left out,
however inconspicuous it is. If nothing helps, the state of rule and optimizer may be the cause,
and the same attempts are made with a fresh state. The search is pure and bounded. Its order
depends only on the updates, so a restarted server leaves out the same ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

ALONE = 8  # updates that are left out one by one before groups are tried


@dataclass(frozen=True)
class Attempt:
    """One try at a round's aggregation."""

    without: frozenset[str] = frozenset()
    with_history: bool = True
    fresh_state: bool = False  # rule and optimizer start with their initial state

    def leaving_out(self, clients: Sequence[str]) -> Attempt:
        """Return the same attempt without these clients only."""
        return replace(self, without=frozenset(clients))


Succeeds = Callable[[Attempt], bool]


def isolate(suspects: Sequence[str], succeeds: Succeeds, *, has_history: bool) -> Attempt | None:
    """Return the first attempt that succeeds, or None.

    `suspects` are the clients of all updates, the most conspicuous first. At least one update
    remains in each attempt. For m updates there are at most 2 (12 + 4 log2 m) attempts.

    >>> succeeds = lambda attempt: "eve" in attempt.without
    >>> isolate(["ann", "bob", "eve"], succeeds, has_history=False).without
    frozenset({'eve'})
    """
    if not suspects:
        return None
    if has_history and succeeds(Attempt()):
        return Attempt()
    for fresh_state in (False, True):
        everyone = Attempt(with_history=not has_history, fresh_state=fresh_state)
        if succeeds(everyone):
            return everyone
        if attempt := _without_some(suspects, everyone, succeeds):
            return attempt
    return None


def _without_some(suspects: Sequence[str], everyone: Attempt, succeeds: Succeeds) -> Attempt | None:
    """Return an attempt without some updates that succeeds, or None.

    It tries single updates first, then halves of the inconspicuous ones, then growing groups of
    the most conspicuous.
    """
    if len(suspects) < 2:
        return None
    for client in suspects[:ALONE]:
        if succeeds(attempt := everyone.leaving_out([client])):
            return attempt
    inconspicuous = suspects[ALONE:]
    if inconspicuous and succeeds(everyone.leaving_out(inconspicuous)):
        return _narrowed(inconspicuous, everyone, succeeds)
    for count in _group_sizes(len(suspects)):
        if succeeds(attempt := everyone.leaving_out(suspects[:count])):
            return attempt
    return None


def _group_sizes(updates: int) -> list[int]:
    """Return 2, 4, 8, … and finally all but one.

    >>> _group_sizes(7), _group_sizes(3), _group_sizes(2)
    ([2, 4, 6], [2], [])
    """
    most = updates - 1
    sizes = {2**power for power in range(1, updates.bit_length())} | {most}
    return sorted(size for size in sizes if 2 <= size <= most)


def _narrowed(group: Sequence[str], everyone: Attempt, succeeds: Succeeds) -> Attempt:
    """Halve a group without which aggregation succeeds, while one half is enough to leave out."""
    while len(group) > 1:
        middle = len(group) // 2
        halves = group[:middle], group[middle:]
        enough = next((half for half in halves if succeeds(everyone.leaving_out(half))), None)
        if enough is None:
            break
        group = enough
    return everyone.leaving_out(group)


def most_conspicuous(clients: Sequence[str], measures: Mapping[str, Sequence[float]]) -> list[str]:
    """Return the clients, those first that have a measure farthest from its median.

    The distance is in orders of magnitude; ties are ordered by name.

    >>> measures = {"norm": [1.0, 1.2, 1e-45], "loss": [0.5, 2.0, 1.0]}
    >>> most_conspicuous(["ann", "bob", "eve"], measures)
    ['eve', 'ann', 'bob']
    """
    if not clients:
        return []
    scores = np.zeros(len(clients))
    for values in measures.values():
        scores = np.maximum(scores, _distances(np.array(values, np.float64)))
    return [
        clients[index]
        for index in sorted(range(len(clients)), key=lambda i: (-scores[i], clients[i]))
    ]


def _distances(values: np.ndarray) -> np.ndarray:
    """Return the orders of magnitude between each value and the median; inf if not finite."""
    tiny = np.finfo(np.float64).tiny
    magnitudes = np.log10(np.maximum(np.abs(np.nan_to_num(values, nan=np.inf)), tiny))
    distances = np.abs(magnitudes - np.median(magnitudes))
    return np.where(np.isfinite(values), np.nan_to_num(distances, nan=0.0), np.inf)
