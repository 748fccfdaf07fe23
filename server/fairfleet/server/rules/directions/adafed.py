"""AdaFed: a common descent direction along which larger losses fall faster.

Hamidi, Yang: AdaFed: Fair Federated Learning via Adaptive Common Descent Direction, TMLR 2024.
The paper's orthogonalisation collapses to one solve with the Gram matrix K of the updates:
c = K^-1 phi / (phi' K^-1 phi). GRAM.md has the derivation.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from fairfleet.server.rules.base import Needs, Rule, State, Step
from fairfleet.server.rules.cohort import Absent, Cohort, Vector
from fairfleet.server.rules.directions.rescaling import rescaled
from fairfleet.server.rules.solvers.algebra import (
    cosines_and_norms,
    nonzero_rows,
    scatter,
    vanishes,
)
from fairfleet.server.rules.solvers.min_norm import min_norm_in_cone

DEPENDENT = 1e-10  # squared sine of the angle between an update and the span of the others


class AdaFed(Rule):
    """The direction d with g_k . d proportional to phi_k = f_k^gamma, for every client."""

    summary: ClassVar[str] = "common descent direction, faster for clients with larger losses"
    gamma: float = Field(default=1.0, ge=0.0)
    phi_norm: Literal["max", "none"] = "max"  # divide the losses by the largest one
    length: Literal["mean", "literal"] = "mean"  # as long as the mean update, or as in the paper
    absent: Absent = "ignore"  # history: absent clients' last rows and losses are objectives too
    absent_rounds: int = Field(default=10, ge=1)  # the greatest age of such a row, in rounds

    def needs(self) -> Needs:
        """Return that losses may not be negative: f^gamma must be larger for the worse client."""
        return Needs(losses="non_negative" if self.gamma else "any", exact_losses=self.gamma > 0.0)

    def window(self, known_clients: int, clients: int) -> int:
        """Return the greatest age of the absent clients' rows."""
        return self.absent_rounds if self.absent == "history" else 0

    def step(self, cohort: Cohort, state: State) -> Step:
        """Return the common descent direction of all objectives whose update is not zero."""
        everyone, rows = cohort.objectives(self.absent, self.absent_rounds), len(cohort.gram)
        phi, moved = self.urgency(everyone.losses), nonzero_rows(everyone.gram)
        if not len(moved):
            return Step(np.zeros(rows), status="stationary")
        if not phi[moved].any():
            return Step(np.zeros(rows), status="all_losses_zero")
        solution, status = common_descent(everyone.gram[np.ix_(moved, moved)], phi[moved])
        coefficients, gram = scatter(solution, everyone.rows[moved], rows), cohort.gram.whole
        notes = {"hist_used": list(everyone.names)} if everyone.names else {}
        if vanishes(coefficients, gram):
            return Step(np.zeros(rows), status="pareto_stationary", notes=notes)
        if status == "ok" and len(moved) < len(everyone):
            status = "zero_gradient_excluded"
        if self.length == "literal":
            return Step(coefficients, status, notes=notes)
        return rescaled(coefficients, gram, len(cohort), status, notes)

    def urgency(self, losses: Vector) -> Vector:
        """Return phi_k = f_k^gamma, where f_k is the loss or its share of the largest loss."""
        size = np.abs(losses)
        if self.phi_norm == "max" and size.max() > 0.0:
            size = size / size.max()
        return np.asarray(size**self.gamma)


def common_descent(gram: Vector, phi: Vector) -> tuple[Vector, str]:
    """Return the coefficients of the common descent direction, and the status.

    It is the minimum-norm point of the affine hull of the g_k / phi_k, or of their convex hull if
    the g_k are linearly dependent.
    """
    cosines, norms = cosines_and_norms(gram)
    scaled = phi / norms
    try:
        inverse = np.linalg.inv(np.linalg.cholesky(cosines))
    except np.linalg.LinAlgError:
        inverse = np.full_like(cosines, np.inf)
    if np.isfinite(inverse).all() and 1.0 / (inverse**2).sum(axis=0).max() >= DEPENDENT:
        z = inverse @ scaled
        return inverse.T @ z / norms / (z @ z), "ok"
    weights = min_norm_in_cone(cosines, scaled / scaled.max()).weights
    return weights / scaled.max() / norms, "dependent_fallback"
