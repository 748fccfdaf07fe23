"""PropFair: proportional fairness of the clients' utilities M - F_k.

Zhang, Malekmohammadi, Chen, Yu: Proportional Fairness in Federated Learning, TMLR 2023.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from fairfleet.server.rules.base import Needs, Rule, State, Step
from fairfleet.server.rules.cohort import Cohort, Weighting, shares


class PropFair(Rule):
    """w_k ~ p_k / max(M - F_k, epsilon): the gradient of -sum p_k log(M - F_k).

    Below a utility of epsilon, the logarithm continues as a straight line.
    """

    summary: ClassVar[str] = "relative gains count: weights p / (M - loss) (proportional fairness)"
    baseline: float = 5.0  # M: the loss at which a client has no utility
    epsilon: float = Field(default=0.2, gt=0.0)  # the smallest utility that is divided by
    scale: Literal["mean", "literal"] = "mean"  # weights that add up to one, or the gradient's own
    weighting: Weighting = "samples"

    def needs(self) -> Needs:
        """Return that no inner products are needed."""
        return Needs(products=False)

    def step(self, cohort: Cohort, state: State) -> Step:
        """Return the weights as coefficients."""
        p = cohort.weights(self.weighting)
        utility = np.maximum(self.baseline - cohort.losses, self.epsilon)
        if self.scale == "literal":
            return Step(p / utility)
        return Step(shares(p * (utility[p > 0.0].min() / utility)))
