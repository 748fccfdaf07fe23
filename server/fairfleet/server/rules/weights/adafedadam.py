"""AdaFedAdam: normalised updates weighted by remaining loss, and a certainty that paces Adam.

Ju, Zhang, Toor, Hellander: Accelerating Fair Federated Learning: Adaptive Federated Adam,
IEEE TMLCN 2024. The element-wise half of the method is the server optimizer `certainty_adam`.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from fairfleet.server.rules.base import Needs, Rule, State, Step
from fairfleet.server.rules.cohort import Cohort, Vector
from fairfleet.server.rules.solvers.algebra import ZERO, scatter

MIN_FIRST_LOSS = 1e-12  # a smaller first loss is no measure of what remains
MIN_CERTAINTY = 0.1  # beta^C must stay below one
Reference = Literal["initial", "first", "none"]


class AdaFedAdam(Rule):
    """d = sum S_k U_k / sum S with U_k = g_k / eta'_k and S_k = n_k (F_k / F_k(0))^alpha.

    eta'_k = |g_k| / |grad F_k| is the distance that local training went per unit of gradient.
    The certainty is C = sum S_k (ln(eta'_k / eta_k) + 1) / sum S, where eta_k is the local
    learning rate.

    `reference` says what the loss is divided by. initial: F_k(0) is the loss on the initial model,
    as in the paper; clients that join late measure it then. first: the loss at the client's first
    participation, which gives clients that join late too much weight. none: nothing, so that
    S_k = n_k F_k^alpha, as in the authors' released code.
    """

    summary: ClassVar[str] = "weighs clients by remaining loss; Adam paced by how far they trained"
    alpha: float = Field(default=1.0, ge=0.0)
    reference: Reference = "initial"

    def needs(self) -> Needs:
        """Return the reports behind eta' and S; the ratio of losses needs losses >= 0."""
        divides = self.alpha > 0.0 and self.reference != "none"
        return Needs(
            reports=("gradient_norm", "local_lr", *(("first_loss",) if divides else ())),
            initial_loss=divides and self.reference == "initial",
            losses="non_negative" if self.alpha else "any",
            positive=("local_lr",),
            products=False,
        )

    def keeping_first_losses(self) -> AdaFedAdam:
        """Return the rule for a federation that began with the losses at first participations."""
        if "reference" in self.model_fields_set:
            return self
        return self.model_copy(update={"reference": "first"})

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
        """Return (F_k / F_k(0))^alpha per client; one where the loss F_k(0) is almost zero."""
        ones = np.ones(len(cohort))
        if not self.alpha:
            return ones
        if self.reference == "none":
            return np.asarray(cohort.losses**self.alpha)
        first = cohort.reported("first_loss")
        lag = np.divide(cohort.losses, first, out=ones, where=first > MIN_FIRST_LOSS)
        return np.asarray(lag**self.alpha)
