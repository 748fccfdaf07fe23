"""AdaFedAdam: normalised updates weighted by remaining loss, and a certainty that paces Adam.

Ju, Zhang, Toor, Hellander: Accelerating Fair Federated Learning: Adaptive Federated Adam,
IEEE TMLCN 2024. The element-wise half of the method is the server optimizer `certainty_adam`.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from pydantic import Field

from fairfleet.server.rules.base import Needs, Rule, State, Step
from fairfleet.server.rules.cohort import Cohort, Vector
from fairfleet.server.rules.solvers.algebra import ZERO, scatter

MIN_FIRST_LOSS = 1e-12  # a smaller first loss is no measure of what remains
MIN_CERTAINTY = 0.1  # beta^C must stay below one


class AdaFedAdam(Rule):
    """d = sum S_k U_k / sum S with U_k = g_k / eta'_k and S_k = n_k (F_k / F_k(0))^alpha.

    eta'_k = |g_k| / |grad F_k| is the distance that local training went per unit of gradient.
    The certainty is C = sum S_k (ln(eta'_k / eta_k) + 1) / sum S, where eta_k is the local
    learning rate.
    """

    summary: ClassVar[str] = "weighs clients by remaining loss; Adam paced by how far they trained"
    alpha: float = Field(default=1.0, ge=0.0)

    def needs(self) -> Needs:
        """Return the reports behind eta' and S; the ratio of losses needs losses >= 0."""
        return Needs(
            reports=("gradient_norm", "local_lr", "first_loss"),
            losses="non_negative" if self.alpha else "any",
            positive=("local_lr",),
            products=False,
        )

    def step(self, cohort: Cohort, state: State) -> Step:
        """Return the weighted normalised updates, without clients whose update is zero."""
        norms, slopes = cohort.own.norms, cohort.reported("gradient_norm")
        share = cohort.samples * self.remaining(cohort)
        usable = np.flatnonzero((norms > ZERO) & (slopes > ZERO))
        if not share[usable].any():
            return Step(np.zeros(len(cohort)), status="no_usable_client", certainty=0.0)
        share = share[usable] / share[usable].sum()
        stretch = norms[usable] / slopes[usable]
        certainty = float(share @ (np.log(stretch / cohort.reported("local_lr")[usable]) + 1.0))
        status = "ok" if len(usable) == len(cohort) else "zero_gradient_excluded"
        if certainty < MIN_CERTAINTY:
            certainty, status = MIN_CERTAINTY, "certainty_clamped"
        return Step(scatter(share / stretch, usable, len(cohort)), status, certainty=certainty)

    def remaining(self, cohort: Cohort) -> Vector:
        """Return (F_k / F_k(0))^alpha per client; one where the first loss is almost zero."""
        first, ones = cohort.reported("first_loss"), np.ones(len(cohort))
        lag = np.divide(cohort.losses, first, out=ones, where=first > MIN_FIRST_LOSS)
        return np.asarray(lag**self.alpha)
