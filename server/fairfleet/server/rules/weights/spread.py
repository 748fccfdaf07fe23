"""Weights that make the losses more alike: GIFAIR-FL, VRed and Semi-VRed.

Each is the gradient of the mean loss plus a penalty on the spread of the losses, so it is a
combination of updates with weights that depend on losses only. GIFAIR-FL: Yue, Nouiehed, Al
Kontar, 2021. Semi-VRed: Malekmohammadi, Yu, 2024.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from pydantic import Field

from fairfleet.server.rules.base import Needs, Rule, State, Step
from fairfleet.server.rules.cohort import Cohort, Vector, Weighting


class GIFAIR(Rule):
    """w_k = p_k + lam r_k: the gradient of sum p_k F_k + lam sum over pairs |F_j - F_k|.

    r_k is the number of clients with a smaller loss minus that with a larger one. lam is a share
    of min p_k / (m - 1), the largest value that leaves all weights at zero or above. Each client
    is a group of its own (individual fairness).
    """

    summary: ClassVar[str] = "penalises differences of losses: weights rise with their rank"
    strength: float = Field(default=0.5, ge=0.0, le=1.0)  # lam relative to its largest value
    weighting: Weighting = "samples"

    def needs(self) -> Needs:
        """Return that no inner products are needed."""
        return Needs(products=False)

    def step(self, cohort: Cohort, state: State) -> Step:
        """Return the weights; clients without a share of samples take no part."""
        p = cohort.weights(self.weighting)
        present = np.flatnonzero(p)
        others = max(len(present) - 1, 1)
        lam = self.strength * float(p[present].min()) / others
        weights = p.copy()
        weights[present] += lam * places(cohort.losses[present])
        return Step(np.maximum(weights, 0.0), notes={"lambda": lam})


def places(losses: Vector) -> Vector:
    """Return how many losses are smaller than each, minus how many are larger."""
    ordered = np.sort(losses)
    smaller = np.searchsorted(ordered, losses, "left")
    larger = len(losses) - np.searchsorted(ordered, losses, "right")
    return np.asarray(smaller - larger, dtype=np.float64)


class SemiVRed(Rule):
    """w_k = p_k (1 + 2 beta (s_k - sum p_j s_j)), s_k = max(F_k - mean F, 0).

    It is the gradient of sum p_k F_k + beta sum p_k s_k^2, the mean loss and its semi-variance.
    With one_sided = false, s_k = F_k - mean F: the variance (VRed).
    """

    summary: ClassVar[str] = "penalises losses above the mean (their semi-variance)"
    beta: float = Field(default=0.1, ge=0.0)
    one_sided: bool = True
    weighting: Weighting = "samples"

    def needs(self) -> Needs:
        """Return that no inner products are needed."""
        return Needs(products=False)

    def step(self, cohort: Cohort, state: State) -> Step:
        """Return the weights, which add up to one; those of small losses may be negative."""
        p = cohort.weights(self.weighting)
        lead = cohort.losses - cohort.losses.max()  # a constant added to all changes nothing
        excess = lead - p @ lead
        if self.one_sided:
            excess = np.maximum(excess, 0.0)
        return Step(p * (1.0 + 2.0 * self.beta * (excess - p @ excess)))
