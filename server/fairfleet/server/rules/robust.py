"""Rules that bear lying clients: Krum by distances, trimmed mean and median by columns.

Krum: Blanchard et al., NeurIPS 2017. Trimmed mean and median: Yin et al., ICML 2018.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from pydantic import Field

from fairfleet.server.blocks import Row
from fairfleet.server.rules.algebra import spread
from fairfleet.server.rules.base import Cohort, Needs, Rule, State, Step, Vector


class Krum(Rule):
    """The mean of the `multi` updates that lie closest to their m - f - 2 nearest neighbours."""

    summary: ClassVar[str] = "the update nearest to the others (multi > 1: the mean of several)"
    f: int = Field(default=1, ge=0)  # how many clients may lie
    multi: int = Field(default=1, ge=1)

    def step(self, cohort: Cohort, state: State) -> Step:
        scores = krum_scores(cohort.own.whole, self.f)
        chosen = np.argsort(scores, kind="stable")[: self.multi]
        weights = spread(np.full(len(chosen), 1.0 / len(chosen)), chosen, len(cohort))
        return Step(weights, notes={"selected": chosen.tolist()})


def krum_scores(gram: Vector, liars: int) -> Vector:
    """Sum of the squared distances to the nearest neighbours, from inner products."""
    squares = np.diagonal(gram)
    distances = np.maximum(squares[:, None] + squares[None, :] - 2.0 * gram, 0.0)
    np.fill_diagonal(distances, np.inf)
    neighbours = min(max(len(gram) - liars - 2, 1), len(gram) - 1)
    return np.asarray(np.sort(distances, axis=1)[:, :neighbours].sum(axis=1))


class TrimmedMean(Rule):
    """Per column, the mean without the `trim` largest and smallest values."""

    summary: ClassVar[str] = "per coordinate, the mean without the extremes"
    trim: int = Field(default=1, ge=0)

    def needs(self) -> Needs:
        return Needs(columns=True)

    def step(self, cohort: Cohort, state: State) -> Step:
        trim = min(self.trim, (len(cohort) - 1) // 2)

        def trimmed_mean(columns: Row) -> Row:
            kept = np.sort(columns, axis=0)[trim : len(columns) - trim]
            return np.asarray(kept.mean(axis=0, dtype=np.float64))

        return Step(np.zeros(len(cohort)), "ok" if trim == self.trim else "trimmed_less", columns=trimmed_mean)


class Median(Rule):
    """Per column, the median."""

    summary: ClassVar[str] = "per coordinate, the median"

    def needs(self) -> Needs:
        return Needs(columns=True)

    def step(self, cohort: Cohort, state: State) -> Step:
        return Step(np.zeros(len(cohort)), columns=middle)


def middle(columns: Row) -> Row:
    """The median of each column: numpy's own keeps more beside the rows, and takes twice as long."""
    ordered, half = np.sort(columns, axis=0), len(columns) // 2
    return np.asarray(ordered[half] if len(columns) % 2 else (ordered[half - 1] + ordered[half]) / 2)
