"""FedMGDA and FedMGDA+: the shortest convex combination of the updates, a direction that harms no client.

Hu, Shaloudegi, Zhang, Yu: Federated Learning Meets Multi-Objective Optimization, IEEE TNSE 2022.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from pydantic import Field

from fairfleet.server.minnorm import min_norm_in_box, min_norm_on_simplex
from fairfleet.server.rules.algebra import moved, spread, unit, vanishes
from fairfleet.server.rules.base import Absent, Cohort, Objectives, Places, Rule, State, Step, Vector, Weighting


class FedMGDA(Rule):
    """d = argmin |sum lam_k g_k|, lam on the simplex; then g_k.d >= |d|^2 for every client."""

    summary: ClassVar[str] = "shortest convex combination: descends for every client"

    def step(self, cohort: Cohort, state: State) -> Step:
        all = cohort.objectives("ignore", 0)
        here = moved(all.gram)
        if not len(here):
            return Step(np.zeros(len(cohort)), status="stationary")
        weights = min_norm_on_simplex(all.gram[np.ix_(here, here)]).weights
        return settle(weights, weights, here, all, len(cohort.gram))


class FedMGDAPlus(Rule):
    """The same on g_k/|g_k|, with |lam_k - lam0_k| <= epsilon."""

    summary: ClassVar[str] = "the same on normalised updates, weights near a prior: robust to inflated updates"
    epsilon: float = Field(default=1.0, ge=0.0, le=1.0)
    lam0: Weighting = "uniform"
    absent: Absent = "ignore"  # or their last rows as objectives, too
    absent_rounds: int = Field(default=10, ge=1)  # not older than this

    def window(self, known: int, clients: int) -> int:
        return self.absent_rounds if self.absent == "history" else 0

    def step(self, cohort: Cohort, state: State) -> Step:
        all = cohort.objectives(self.absent, self.absent_rounds)
        here = moved(all.gram)
        if not len(here):
            return Step(np.zeros(len(cohort)), status="stationary")
        cosines, norms = unit(all.gram[np.ix_(here, here)])
        prior = all.weights(self.lam0)[here]
        prior = prior / prior.sum()
        weights = min_norm_in_box(cosines, np.maximum(prior - self.epsilon, 0.0), prior + self.epsilon).weights
        return settle(weights / norms, weights, here, all, len(cohort.gram))


def settle(coefficients: Vector, weights: Vector, here: Places, all: Objectives, rows: int) -> Step:
    """The step of the clients that moved, or none at a Pareto-stationary point."""
    full = spread(coefficients, all.places[here], rows)
    notes = {"lam": spread(weights, here, len(all))} | ({"hist_used": list(all.names)} if all.names else {})
    if vanishes(spread(coefficients, here, len(all)), all.gram):
        return Step(np.zeros(rows), status="pareto_stationary", notes=notes)
    return Step(full, status="ok" if len(here) == len(all) else "zero_gradient_excluded", notes=notes)
