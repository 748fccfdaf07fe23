"""FedAvg and FedAvg-n: the weighted mean of the updates, as they are or each scaled to length one.

FedAvg: McMahan et al., AISTATS 2017. FedAvg-n: Hu et al., FedMGDA+, IEEE TNSE 2022.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from fairfleet.server.rules.base import Needs, Rule, State, Step
from fairfleet.server.rules.cohort import Cohort, Weighting, shares
from fairfleet.server.rules.solvers.algebra import ZERO, scatter


class FedAvg(Rule):
    """The weighted mean of the updates: d = sum w_k g_k."""

    summary: ClassVar[str] = "weighted mean of the updates"
    weighting: Weighting = "samples"

    def needs(self) -> Needs:
        """Return that neither inner products nor losses are needed."""
        return Needs(products=False, exact_losses=False)

    def is_plain_mean(self) -> bool:
        """Return whether the weights are uniform. A subclass may do anything, so it is not."""
        return type(self) is FedAvg and self.weighting == "uniform"

    def step(self, cohort: Cohort, state: State) -> Step:
        """Return the weights as coefficients."""
        return Step(cohort.weights(self.weighting))


class FedAvgN(Rule):
    """The weighted mean of the updates scaled to length one: d = sum w_k g_k / |g_k|."""

    summary: ClassVar[str] = "mean of the normalised updates: a large update cannot dominate"
    weighting: Weighting = "uniform"

    def needs(self) -> Needs:
        """Return that neither inner products nor losses are needed, only lengths."""
        return Needs(products=False, exact_losses=False)

    def step(self, cohort: Cohort, state: State) -> Step:
        """Return the weights over the lengths, without clients whose update is zero."""
        moved = np.flatnonzero(cohort.own.norms > ZERO)
        if not len(moved):
            return Step(np.zeros(len(cohort)), status="stationary")
        weights = cohort.weights(self.weighting)[moved]
        return Step(scatter(shares(weights) / cohort.own.norms[moved], moved, len(cohort)))
