"""AdaFedAdam: normalised updates weighted by how far a client lags, and a certainty that paces Adam.

Ju, Zhang, Toor, Hellander: Accelerating Fair Federated Learning: Adaptive Federated Adam, IEEE TMLCN 2024.
The element-wise half is the server optimizer `certainty_adam`.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from pydantic import Field

from fairfleet.server.rules.algebra import ZERO, spread
from fairfleet.server.rules.base import Cohort, Needs, Rule, State, Step

LEAST_CERTAINTY = 0.1  # beta^C must stay below one


class AdaFedAdam(Rule):
    """d = sum S_k U_k / sum S with U_k = g_k / eta'_k, eta'_k = |g_k| / |grad F_k|, S_k = n_k (F_k / F_k(0))^alpha"""

    summary: ClassVar[str] = "weighs clients by remaining loss; Adam paced by how far they trained"
    alpha: float = Field(default=1.0, ge=0.0)

    def needs(self) -> Needs:
        return Needs(reports=("gradient_norm", "local_lr", "first_loss"))

    def step(self, cohort: Cohort, state: State) -> Step:
        norms, slopes = cohort.own.norms, cohort.reported("gradient_norm")
        first = cohort.reported("first_loss")
        lag = np.divide(cohort.losses, first, out=np.ones(len(cohort)), where=first > 0.0)
        share = cohort.samples * lag**self.alpha
        here = np.flatnonzero((norms > ZERO) & (slopes > ZERO))
        if not share[here].any():
            return Step(np.zeros(len(cohort)), status="no_usable_client", certainty=0.0)
        share = share[here] / share[here].sum()
        stretch = norms[here] / slopes[here]
        certainty = float(share @ (np.log(stretch / cohort.reported("local_lr")[here]) + 1.0))
        status = "ok" if len(here) == len(cohort) else "zero_gradient_excluded"
        if certainty < LEAST_CERTAINTY:
            certainty, status = LEAST_CERTAINTY, "certainty_clamped"
        return Step(spread(share / stretch, here, len(cohort)), status, certainty=certainty)
