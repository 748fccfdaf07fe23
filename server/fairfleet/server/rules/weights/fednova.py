"""FedNova: updates normalised by the amount of local work behind them.

Wang, Liu, Liang, Joshi, Poor: Tackling the Objective Inconsistency Problem, NeurIPS 2020.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from pydantic import Field

from fairfleet.server.rules.base import Needs, Rule, State, Step
from fairfleet.server.rules.cohort import Cohort, Vector


class FedNova(Rule):
    """d = tau_eff sum p_k g_k / a_k, where p_k are the sample shares and a_k the local work.

    tau_eff = sum p_k a_k, or sum p_k steps_k if the clients use a proximal term.
    """

    summary: ClassVar[str] = (
        "mean of updates per unit of local work: clients that train longer weigh no more"
    )
    momentum: float = Field(default=0.0, ge=0.0, lt=1.0)  # of the clients' solver
    lr_mu: float = Field(default=0.0, ge=0.0)  # the clients' learning rate times proximal mu

    def needs(self) -> Needs:
        """Return that clients must report their number of local steps, and no losses."""
        return Needs(reports=("steps",), products=False, exact_losses=False)

    def step(self, cohort: Cohort, state: State) -> Step:
        """Return the normalised mean; a client without local steps has no weight."""
        p, steps = cohort.weights("samples"), cohort.reported("steps")
        work = self.work(steps)
        effective = float(p @ steps if self.lr_mu > 0.0 else p @ work)
        per_work = np.divide(p, work, out=np.zeros(len(p)), where=work > 0.0)
        return Step(effective * per_work, notes={"tau_eff": effective})

    def work(self, steps: Vector) -> Vector:
        """Return a_k: the sum of the weights that the local gradients have in the update."""
        if self.lr_mu > 0.0:
            return np.asarray((1.0 - (1.0 - self.lr_mu) ** steps) / self.lr_mu)
        r = self.momentum
        return np.asarray((steps - r * (1.0 - r**steps) / (1.0 - r)) / (1.0 - r))
