"""FedMGDA and FedMGDA+: the shortest convex combination of the updates.

It is a direction that increases no client's loss to first order. Hu, Shaloudegi, Zhang, Yu:
Federated Learning Meets Multi-Objective Optimization, IEEE TNSE 2022.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from pydantic import Field, model_validator

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
from fairfleet.server.rules.directions.preferences import (
    Preferences,
    active_constraints,
    check_preferences,
    preferred_combination,
)
from fairfleet.server.rules.solvers.algebra import nonzero_rows, scatter, vanishes
from fairfleet.server.rules.solvers.min_norm import min_norm_in_box, min_norm_on_simplex


class FedMGDA(Rule):
    """d = argmin |sum lam_k g_k| over the simplex, with |lam_k - lam0_k| <= epsilon.

    With epsilon = 1, g_k . d >= |d|^2 for every client. With epsilon = 0, d is the mean with the
    weights lam0: FedAvg. `preferences` adds linear constraints on the losses (see `preferences`).
    """

    summary: ClassVar[str] = "shortest convex combination: descends for every client"
    normalised: ClassVar[bool] = False  # whether updates are scaled to length one first
    epsilon: float = Field(default=1.0, ge=0.0, le=1.0)
    lam0: Weighting = "uniform"
    preferences: Preferences = ()  # preference vectors, such as "ann:2;*:1|ann:1;*:2"
    chosen: int = Field(default=0, ge=0)  # the index of the vector that the losses should follow
    active: float = Field(default=0.0, ge=0.0)  # constraints this near to zero count already

    @model_validator(mode="after")
    def _check_preferences(self) -> FedMGDA:
        check_preferences(self.preferences, self.chosen, self.epsilon)
        return self

    def needs(self) -> Needs:
        """Return that losses are read with preferences only, and may not be negative then."""
        if self.preferences:
            return Needs(losses="non_negative")
        return Needs(exact_losses=False)

    def objectives(self, cohort: Cohort) -> Objectives:
        """Return the clients whose losses must fall."""
        return cohort.objectives("ignore", 0)

    def step(self, cohort: Cohort, state: State) -> Step:
        """Return the shortest combination of the updates that are not zero, near lam0."""
        everyone = self.objectives(cohort)
        moved = nonzero_rows(everyone.gram)
        if not len(moved):
            return Step(np.zeros(len(cohort.gram)), status="stationary")
        if self.preferences:
            return self._preferred(cohort, everyone, moved)
        gram = everyone.gram[np.ix_(moved, moved)]
        norms = np.sqrt(np.diagonal(gram)) if self.normalised else np.ones(len(moved))
        weights = self.weights(gram / np.outer(norms, norms), everyone.weights(self.lam0)[moved])
        return step_or_stationary(weights / norms, weights, moved, everyone, len(cohort.gram))

    def weights(self, gram: Vector, prior: Vector) -> Vector:
        """Return the weights of the shortest combination with weights near the prior."""
        if self.epsilon >= 1.0 and not self.normalised:
            return min_norm_on_simplex(gram).weights
        prior = shares(prior)
        lower, upper = np.maximum(prior - self.epsilon, 0.0), prior + self.epsilon
        return min_norm_in_box(gram, lower, upper).weights

    def _preferred(self, cohort: Cohort, everyone: Objectives, moved: Indices) -> Step:
        names = [*cohort.clients, *everyone.names]
        constraints = active_constraints(
            everyone.losses, names, self.preferences, self.chosen, self.active
        )
        solution = preferred_combination(everyone.gram, moved, constraints, self.normalised)
        notes = {"lam": solution.lam, "active": solution.active} | _used_history(everyone)
        coefficients = scatter(solution.coefficients, everyone.rows, len(cohort.gram))
        status = solution.status
        if status == "ok" and len(moved) < len(everyone):
            status = "zero_gradient_excluded"
        return Step(coefficients, status=status, notes=notes)


class FedMGDAPlus(FedMGDA):
    """FedMGDA on the normalised updates g_k / |g_k|."""

    summary: ClassVar[str] = (
        "the same on normalised updates, weights near a prior: robust to inflated updates"
    )
    normalised: ClassVar[bool] = True
    absent: Absent = "ignore"  # history: absent clients' last rows are objectives too
    absent_rounds: int = Field(default=10, ge=1)  # the greatest age of such a row, in rounds

    def window(self, known_clients: int, clients: int) -> int:
        """Return the greatest age of the absent clients' rows."""
        return self.absent_rounds if self.absent == "history" else 0

    def objectives(self, cohort: Cohort) -> Objectives:
        """Return the clients whose losses must fall, perhaps absent clients too."""
        return cohort.objectives(self.absent, self.absent_rounds)


def step_or_stationary(
    coefficients: Vector, weights: Vector, moved: Indices, everyone: Objectives, rows: int
) -> Step:
    """Return the step of the objectives that moved, or a zero step at a Pareto-stationary point.

    `coefficients` and `weights` have one entry per index in `moved`; `rows` is the number of rows
    of the cohort.
    """
    notes = {"lam": scatter(weights, moved, len(everyone))} | _used_history(everyone)
    if vanishes(scatter(coefficients, moved, len(everyone)), everyone.gram):
        return Step(np.zeros(rows), status="pareto_stationary", notes=notes)
    status = "ok" if len(moved) == len(everyone) else "zero_gradient_excluded"
    return Step(scatter(coefficients, everyone.rows[moved], rows), status=status, notes=notes)


def _used_history(everyone: Objectives) -> dict[str, object]:
    return {"hist_used": list(everyone.names)} if everyone.names else {}
