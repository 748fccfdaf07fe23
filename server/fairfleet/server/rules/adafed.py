"""AdaFed: a common descent direction along which a client's loss falls the faster, the larger it is.

Hamidi, Yang: AdaFed: Fair Federated Learning via Adaptive Common Descent Direction, TMLR 2024.
The paper's orthogonalisation collapses to one solve, c = K^-1 phi / (phi' K^-1 phi): see GRAM.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from fairfleet.server.minnorm import min_norm_in_cone
from fairfleet.server.rules.algebra import length, moved, spread, uniform, unit, vanishes
from fairfleet.server.rules.base import Absent, Cohort, Rule, State, Step, Vector

DEPENDENT = 1e-10  # squared sine of the angle between an update and the span of the others


class AdaFed(Rule):
    """g_k . d is proportional to phi_k = f_k^gamma, for every client and whatever their order."""

    summary: ClassVar[str] = "common descent direction, faster for clients with larger losses"
    gamma: float = Field(default=1.0, ge=0.0)
    phi_norm: Literal["max", "none"] = "max"
    length: Literal["mean", "literal"] = "mean"  # rescaled to the mean update, or as the paper prints it
    absent: Absent = "ignore"  # or their last rows as objectives, too, with the losses they reported then
    absent_rounds: int = Field(default=10, ge=1)  # not older than this

    def window(self, known: int, clients: int) -> int:
        return self.absent_rounds if self.absent == "history" else 0

    def step(self, cohort: Cohort, state: State) -> Step:
        all, rows = cohort.objectives(self.absent, self.absent_rounds), len(cohort.gram)
        phi, here = self.urgency(all.losses), moved(all.gram)
        if not len(here):
            return Step(np.zeros(rows), status="stationary")
        if not phi[here].any():
            return Step(np.zeros(rows), status="all_losses_zero")
        found, status = common_descent(all.gram[np.ix_(here, here)], phi[here])
        coefficients, gram = spread(found, all.places[here], rows), cohort.gram.whole
        notes = {"hist_used": list(all.names)} if all.names else {}
        if vanishes(coefficients, gram):
            return Step(np.zeros(rows), status="pareto_stationary", notes=notes)
        if status == "ok" and len(here) < len(all):
            status = "zero_gradient_excluded"
        if self.length == "literal":
            return Step(coefficients, status, notes=notes)
        return rescaled(coefficients, gram, len(cohort), status, notes)

    def urgency(self, losses: Vector) -> Vector:
        size = np.abs(losses)
        if self.phi_norm == "max" and size.max() > 0.0:
            size = size / size.max()
        return np.asarray(size**self.gamma)


def common_descent(gram: Vector, phi: Vector) -> tuple[Vector, str]:
    """The minimum-norm point of the affine hull of g_k/phi_k; of their convex hull if the g_k are dependent."""
    cosines, norms = unit(gram)
    scaled = phi / norms
    try:
        inverse = np.linalg.inv(np.linalg.cholesky(cosines))
    except np.linalg.LinAlgError:
        inverse = np.full_like(cosines, np.inf)
    if np.isfinite(inverse).all() and 1.0 / (inverse**2).sum(axis=0).max() >= DEPENDENT:
        z = inverse @ scaled
        return inverse.T @ z / norms / (z @ z), "ok"
    return min_norm_in_cone(cosines, scaled / scaled.max()).weights / scaled.max() / norms, "dependent_fallback"


def rescaled(coefficients: Vector, gram: Vector, clients: int, status: str, notes: Mapping[str, Any]) -> Step:
    """The same direction, as long as the mean update: phi to the fifth power must not set the step size."""
    mean = uniform(clients, len(gram))
    if vanishes(mean, gram):
        return Step(np.zeros(len(gram)), status="zero_mean", notes=notes)
    return Step(coefficients * length(mean, gram) / length(coefficients, gram), status, notes=notes)
