"""Superquantile aggregation: the mean over the share of clients with the largest losses.

Pillutla, Laguel, Malick, Harchaoui: Federated Learning with Superquantile Aggregation for
Heterogeneous Data (Delta-FL), 2021.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from fairfleet.server.rules.base import Needs, Rule, State, Step
from fairfleet.server.rules.cohort import Cohort, Vector, Weighting, shares


class Superquantile(Rule):
    """The weights that maximise sum w_k F_k over the simplex with w_k <= p_k / theta.

    theta = 1 is FedAvg; a theta of at most the smallest p_k is the client with the largest loss.
    With form = filtered, the clients at or above the quantile keep their p_k, rescaled: the
    authors' algorithm, which does not split the weight of the client at the quantile.
    """

    summary: ClassVar[str] = "mean over the worst-off share of the clients (superquantile)"
    theta: float = Field(default=0.5, gt=0.0, le=1.0)  # that share
    form: Literal["exact", "filtered"] = "exact"
    weighting: Weighting = "samples"

    def needs(self) -> Needs:
        """Return that no inner products are needed."""
        return Needs(products=False)

    def step(self, cohort: Cohort, state: State) -> Step:
        """Return the weights; clients with equal losses are treated alike."""
        p = cohort.weights(self.weighting)
        weights = tail_weights(p, cohort.losses, self.theta)
        if self.form == "filtered":
            weights = shares(np.where(weights > 0.0, p, 0.0))
        return Step(weights)


def tail_weights(p: Vector, losses: Vector, theta: float) -> Vector:
    """Return the maximiser of w . losses over w >= 0 with sum 1 and w <= p / theta."""
    values, group = np.unique(losses, return_inverse=True)
    mass = np.bincount(group, p, len(values)) / theta
    larger = np.cumsum(mass[::-1])[::-1] - mass  # the room above each loss
    used = np.clip(1.0 - larger, 0.0, mass)
    part = np.divide(used, mass, out=np.zeros(len(values)), where=mass > 0.0)
    return shares(p * part[group])
