"""FedMGDA and FedMGDA+: the shortest convex combination of the updates.

It is a direction that increases no client's loss to first order. Hu, Shaloudegi, Zhang, Yu:
Federated Learning Meets Multi-Objective Optimization, IEEE TNSE 2022.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from pydantic import Field

from fairfleet.server.rules.base import Needs, Rule, State, Step
from fairfleet.server.rules.cohort import (
    Absent,
    Cohort,
    Indices,
    Objectives,
    Vector,
    Weighting,
    shares,
)
from fairfleet.server.rules.solvers.algebra import (
    cosines_and_norms,
    nonzero_rows,
    scatter,
    vanishes,
)
from fairfleet.server.rules.solvers.min_norm import min_norm_in_box, min_norm_on_simplex


class FedMGDA(Rule):
    """d = argmin |sum lam_k g_k|, lam on the simplex; then g_k . d >= |d|^2 for every client."""

    summary: ClassVar[str] = "shortest convex combination: descends for every client"

    def needs(self) -> Needs:
        """Return that the rule reads no losses."""
        return Needs(exact_losses=False)

    def step(self, cohort: Cohort, state: State) -> Step:
        """Return the shortest convex combination of the updates that are not zero."""
        everyone = cohort.objectives("ignore", 0)
        moved = nonzero_rows(everyone.gram)
        if not len(moved):
            return Step(np.zeros(len(cohort)), status="stationary")
        weights = min_norm_on_simplex(everyone.gram[np.ix_(moved, moved)]).weights
        return step_or_stationary(weights, weights, moved, everyone, len(cohort.gram))


class FedMGDAPlus(Rule):
    """FedMGDA on the normalised updates g_k / |g_k|, with |lam_k - lam0_k| <= epsilon."""

    summary: ClassVar[str] = (
        "the same on normalised updates, weights near a prior: robust to inflated updates"
    )
    epsilon: float = Field(default=1.0, ge=0.0, le=1.0)
    lam0: Weighting = "uniform"
    absent: Absent = "ignore"  # history: absent clients' last rows are objectives too
    absent_rounds: int = Field(default=10, ge=1)  # the greatest age of such a row, in rounds

    def needs(self) -> Needs:
        """Return that the rule reads no losses."""
        return Needs(exact_losses=False)

    def window(self, known_clients: int, clients: int) -> int:
        """Return the greatest age of the absent clients' rows."""
        return self.absent_rounds if self.absent == "history" else 0

    def step(self, cohort: Cohort, state: State) -> Step:
        """Return the shortest combination of normalised updates with weights near lam0."""
        everyone = cohort.objectives(self.absent, self.absent_rounds)
        moved = nonzero_rows(everyone.gram)
        if not len(moved):
            return Step(np.zeros(len(cohort)), status="stationary")
        cosines, norms = cosines_and_norms(everyone.gram[np.ix_(moved, moved)])
        prior = everyone.weights(self.lam0)[moved]
        prior = shares(prior)
        weights = min_norm_in_box(
            cosines, np.maximum(prior - self.epsilon, 0.0), prior + self.epsilon
        ).weights
        return step_or_stationary(weights / norms, weights, moved, everyone, len(cohort.gram))


def step_or_stationary(
    coefficients: Vector, weights: Vector, moved: Indices, everyone: Objectives, rows: int
) -> Step:
    """Return the step of the objectives that moved, or a zero step at a Pareto-stationary point.

    `coefficients` and `weights` have one entry per index in `moved`; `rows` is the number of rows
    of the cohort.
    """
    notes = {"lam": scatter(weights, moved, len(everyone))} | (
        {"hist_used": list(everyone.names)} if everyone.names else {}
    )
    if vanishes(scatter(coefficients, moved, len(everyone)), everyone.gram):
        return Step(np.zeros(rows), status="pareto_stationary", notes=notes)
    status = "ok" if len(moved) == len(everyone) else "zero_gradient_excluded"
    return Step(scatter(coefficients, everyone.rows[moved], rows), status=status, notes=notes)
