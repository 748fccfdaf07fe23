"""AdaFed: a common descent direction along which a client's loss falls the faster, the larger it is.

Hamidi, Yang: AdaFed: Fair Federated Learning via Adaptive Common Descent Direction, TMLR 2024.
The paper's orthogonalisation collapses to one solve, c = K^-1 phi / (phi' K^-1 phi): see GRAM.md.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from fairfleet.server.minnorm import min_norm_in_cone
from fairfleet.server.rules.algebra import length, moved, spread, uniform, unit, vanishes
from fairfleet.server.rules.base import Cohort, Rule, State, Step, Vector

DEPENDENT = 1e-10  # squared sine of the angle between an update and the span of the others


class AdaFed(Rule):
    """g_k . d is proportional to phi_k = f_k^gamma, for every client and whatever their order."""

    summary: ClassVar[str] = "common descent direction, faster for clients with larger losses"
    gamma: float = Field(default=1.0, ge=0.0)
    phi_norm: Literal["max", "none"] = "max"
    length: Literal["mean", "literal"] = "mean"  # rescaled to the mean update, or as the paper prints it

    def step(self, cohort: Cohort, state: State) -> Step:
        phi, gram = self.urgency(cohort.losses), cohort.own.whole
        here = moved(gram)
        if not len(here):
            return Step(np.zeros(len(cohort)), status="stationary")
        if not phi[here].any():
            return Step(np.zeros(len(cohort)), status="all_losses_zero")
        found, status = common_descent(gram[np.ix_(here, here)], phi[here])
        coefficients = spread(found, here, len(cohort))
        if vanishes(coefficients, gram):
            return Step(np.zeros(len(cohort)), status="pareto_stationary")
        if status == "ok" and len(here) < len(cohort):
            status = "zero_gradient_excluded"
        return Step(coefficients, status) if self.length == "literal" else rescaled(coefficients, gram, status)

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


def rescaled(coefficients: Vector, gram: Vector, status: str) -> Step:
    """The same direction, as long as the mean update: phi to the fifth power must not set the step size."""
    mean = uniform(len(gram), len(gram))
    if vanishes(mean, gram):
        return Step(np.zeros(len(gram)), status="zero_mean")
    return Step(coefficients * length(mean, gram) / length(coefficients, gram), status)
