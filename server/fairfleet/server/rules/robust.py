"""Rules that tolerate hostile clients: Krum by distances, trimmed mean and median by columns.

Krum: Blanchard et al., NeurIPS 2017. Trimmed mean and median: Yin et al., ICML 2018.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from pydantic import Field

from fairfleet.server.gram.blocks import Row, all_finite
from fairfleet.server.rules.base import Needs, Rule, State, Step
from fairfleet.server.rules.cohort import Cohort, Vector
from fairfleet.server.rules.solvers.algebra import scatter


class Krum(Rule):
    """The mean of the `multi` updates that lie closest to their m - f - 2 nearest neighbours."""

    summary: ClassVar[str] = "the update nearest to the others (multi > 1: the mean of several)"
    f: int = Field(default=1, ge=0)  # the number of clients that may be hostile
    multi: int = Field(default=1, ge=1)

    def needs(self) -> Needs:
        """Return that the rule reads no losses."""
        return Needs(exact_losses=False)

    def step(self, cohort: Cohort, state: State) -> Step:
        """Return equal coefficients for the updates with the lowest scores."""
        scores = krum_scores(cohort.own.whole, self.f)
        chosen = np.argsort(scores, kind="stable")[: self.multi]
        weights = scatter(np.full(len(chosen), 1.0 / len(chosen)), chosen, len(cohort))
        return Step(weights, buffer_shares=weights, notes={"selected": chosen.tolist()})


def krum_scores(gram: Vector, hostile: int) -> Vector:
    """Return each row's sum of squared distances to its m - hostile - 2 nearest neighbours.

    Squared distances come from inner products: |a - b|^2 = a.a + b.b - 2 a.b.
    """
    squares = np.diagonal(gram)
    distances = np.maximum(squares[:, None] + squares[None, :] - 2.0 * gram, 0.0)
    np.fill_diagonal(distances, np.inf)
    neighbours = min(max(len(gram) - hostile - 2, 1), len(gram) - 1)
    return np.asarray(np.sort(distances, axis=1)[:, :neighbours].sum(axis=1))


class TrimmedMean(Rule):
    """Per column, the mean without the `trim` largest and the `trim` smallest values."""

    summary: ClassVar[str] = "per coordinate, the mean without the extremes"
    trim: int = Field(default=1, ge=0)

    def needs(self) -> Needs:
        """Return that the rule works on columns; it needs no inner products and no losses."""
        return Needs(columns=True, products=False, exact_losses=False)

    def step(self, cohort: Cohort, state: State) -> Step:
        """Return the trimmed mean as a column rule; trim less if there are too few clients."""
        trim = min(self.trim, (len(cohort) - 1) // 2)

        def trimmed_mean(columns: Row) -> Row:
            central = np.sort(columns, axis=0)[trim : len(columns) - trim]
            return np.asarray(central.mean(axis=0, dtype=np.float64))

        status = "ok" if trim == self.trim else "trimmed_less"
        return Step(np.zeros(len(cohort)), status, columns=trimmed_mean)


class Median(Rule):
    """Per column, the median."""

    summary: ClassVar[str] = "per coordinate, the median"

    def needs(self) -> Needs:
        """Return that the rule works on columns; it needs no inner products and no losses."""
        return Needs(columns=True, products=False, exact_losses=False)

    def step(self, cohort: Cohort, state: State) -> Step:
        """Return the median as a column rule."""
        return Step(np.zeros(len(cohort)), columns=column_median)


def column_median(columns: Row) -> Row:
    """Return the median of each column of a (rows, columns) array.

    numpy's own median needs more memory and takes twice as long.
    """
    ordered, half = np.sort(columns, axis=0), len(columns) // 2
    if len(columns) % 2:
        return np.asarray(ordered[half])
    with np.errstate(over="ignore"):
        both = ordered[half - 1] + ordered[half]
        if all_finite(both):
            return np.asarray(both / 2)
    # The sum may overflow although the mean fits the type.
    return np.asarray(ordered[half - 1] / 2 + ordered[half] / 2)
