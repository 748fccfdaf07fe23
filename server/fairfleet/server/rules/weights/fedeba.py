"""FedEBA+: weights of the largest entropy that still serve the clients with large losses.

Wang, Wang, Karimireddy, Tang: FedEBA+, 2023. Only the aggregation weights; the paper's alignment
of models and gradients is left out.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from pydantic import Field

from fairfleet.server.rules.base import Needs, Rule, State, Step
from fairfleet.server.rules.cohort import Cohort, Weighting, shares


class FedEBA(Rule):
    """w_k ~ q_k exp(F_k / tau): the maximiser of sum w_k F_k - tau KL(w, q) on the simplex.

    KL(w, q) is the relative entropy to the prior q. tau near 0 serves the largest loss only; a
    large tau gives the prior.
    """

    summary: ClassVar[str] = "weights exp(loss / tau): the largest entropy (FedEBA+, weights only)"
    tau: float = Field(default=0.5, gt=0.0)
    weighting: Weighting = "uniform"  # the prior q

    def needs(self) -> Needs:
        """Return that no inner products are needed."""
        return Needs(products=False)

    def step(self, cohort: Cohort, state: State) -> Step:
        """Return the weights. Exponents are at most zero, so none overflows."""
        prior = cohort.weights(self.weighting)
        lead = cohort.losses - cohort.losses[prior > 0.0].max()
        return Step(shares(prior * np.exp(np.minimum(lead, 0.0) / self.tau)))
