"""FedMGDA and FedMGDA+: the shortest convex combination of the updates, a direction that harms no client.

Hu, Shaloudegi, Zhang, Yu: Federated Learning Meets Multi-Objective Optimization, IEEE TNSE 2022.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from pydantic import Field

from fairfleet.server.minnorm import min_norm_in_box, min_norm_on_simplex
from fairfleet.server.rules.algebra import moved, spread, unit, vanishes
from fairfleet.server.rules.base import Cohort, Places, Rule, State, Step, Vector, Weighting


class FedMGDA(Rule):
    """d = argmin |sum lam_k g_k|, lam on the simplex; then g_k.d >= |d|^2 for every client."""

    summary: ClassVar[str] = "shortest convex combination: descends for every client"

    def step(self, cohort: Cohort, state: State) -> Step:
        gram = cohort.own.whole
        here = moved(gram)
        if not len(here):
            return Step(np.zeros(len(cohort)), status="stationary")
        weights = min_norm_on_simplex(gram[np.ix_(here, here)]).weights
        return settle(weights, weights, here, cohort)


class FedMGDAPlus(Rule):
    """The same on g_k/|g_k|, with |lam_k - lam0_k| <= epsilon."""

    summary: ClassVar[str] = "the same on normalised updates, weights near a prior: robust to inflated updates"
    epsilon: float = Field(default=1.0, ge=0.0, le=1.0)
    lam0: Weighting = "uniform"

    def step(self, cohort: Cohort, state: State) -> Step:
        gram = cohort.own.whole
        here = moved(gram)
        if not len(here):
            return Step(np.zeros(len(cohort)), status="stationary")
        cosines, norms = unit(gram[np.ix_(here, here)])
        prior = cohort.weights(self.lam0)[here]
        prior = prior / prior.sum()
        weights = min_norm_in_box(cosines, np.maximum(prior - self.epsilon, 0.0), prior + self.epsilon).weights
        return settle(weights / norms, weights, here, cohort)


def settle(coefficients: Vector, weights: Vector, here: Places, cohort: Cohort) -> Step:
    """The step of the clients that moved, or none at a Pareto-stationary point."""
    full = spread(coefficients, here, len(cohort))
    notes = {"lam": spread(weights, here, len(cohort))}
    if vanishes(full, cohort.own.whole):
        return Step(np.zeros(len(cohort)), status="pareto_stationary", notes=notes)
    return Step(full, status="ok" if len(here) == len(cohort) else "zero_gradient_excluded", notes=notes)
