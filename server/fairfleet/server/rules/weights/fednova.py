"""FedNova: updates normalised by the amount of local work behind them.

Wang, Liu, Liang, Joshi, Poor: Tackling the Objective Inconsistency Problem, NeurIPS 2020.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from pydantic import Field

from fairfleet.common.training_plan import Plan
from fairfleet.server.rules.base import Needs, Rule, State, Step
from fairfleet.server.rules.cohort import Cohort, Vector
from fairfleet.server.rules.errors import RuleError

REMEDY = (
    "Train with solver sgd, with a momentum or with a proximal term but not both, or choose "
    "another rule, such as fedavg"
)


class FedNova(Rule):
    """d = tau_eff sum p_k g_k / a_k, where p_k are the sample shares and a_k the local work.

    tau_eff = sum p_k a_k, or sum p_k steps_k if the clients use a proximal term. The rule takes
    momentum and proximal term from the clients' plan, unless they are given.
    """

    summary: ClassVar[str] = (
        "mean of updates per unit of local work: clients that train longer weigh no more"
    )
    momentum: float | None = Field(default=None, ge=0.0, lt=1.0)  # None: as in the plan
    nesterov: bool | None = None  # whether it is Nesterov momentum; None: as in the plan
    proximal_mu: float | None = Field(default=None, ge=0.0)  # None: as in the plan
    # The clients' learning rate times proximal mu; None: proximal_mu and the reported rates.
    lr_mu: float | None = Field(default=None, ge=0.0)

    def needs(self) -> Needs:
        """Return that clients must report their local steps, and perhaps learning rates."""
        rates = ("local_lr",) if self.proximal_mu and self.lr_mu is None else ()
        reports = ("steps", *rates)
        return Needs(reports=reports, positive=rates, products=False, exact_losses=False)

    def for_plan(self, plan: Plan) -> FedNova:
        """Return the rule with the plan's solver; raise RuleError for one without a formula."""
        momentum = plan.momentum if self.momentum is None else self.momentum
        nesterov = plan.nesterov if self.nesterov is None else self.nesterov
        mu = plan.proximal_mu if self.proximal_mu is None else self.proximal_mu
        if plan.solver != "sgd":
            raise RuleError(
                f"fednova has no formula for the work of solver {plan.solver!r}. {REMEDY}"
            )
        if momentum and (mu if self.lr_mu is None else self.lr_mu):
            raise RuleError(
                f"fednova has no formula for momentum {momentum:g} together with a proximal term. "
                f"{REMEDY}"
            )
        nesterov = bool(nesterov and momentum)
        values = {"momentum": momentum, "nesterov": nesterov, "proximal_mu": mu}
        return self.model_copy(update=values)

    def step(self, cohort: Cohort, state: State) -> Step:
        """Return the normalised mean; a client without local steps has no weight."""
        p, steps = cohort.weights("samples"), cohort.reported("steps")
        pull = self._pull(cohort)
        work = self.work(steps) if pull is None else proximal_work(steps, pull)
        effective = float(p @ (work if pull is None else steps))
        per_work = np.divide(p, work, out=np.zeros(len(p)), where=work > 0.0)
        return Step(effective * per_work, notes={"tau_eff": effective})

    def _pull(self, cohort: Cohort) -> Vector | None:
        """Return each client's learning rate times mu; None without a proximal term."""
        if self.lr_mu:
            return np.full(len(cohort), self.lr_mu)
        if self.proximal_mu and self.lr_mu is None:
            return self.proximal_mu * cohort.reported("local_lr")
        return None

    def work(self, steps: Vector) -> Vector:
        """Return a_k: the sum of the weights that the local gradients have in the update.

        With momentum r, the gradient of step i of s counts (1 - r^(s-i+1)) / (1 - r) times; with
        Nesterov momentum, (1 - r^(s-i+2)) / (1 - r) times.
        """
        r = self.momentum or 0.0
        lost = r**2 if self.nesterov else r
        return np.asarray((steps - lost * (1.0 - r**steps) / (1.0 - r)) / (1.0 - r))


def proximal_work(steps: Vector, pull: Vector) -> Vector:
    """Return a_k with a proximal term: (1 - (1 - x)^s) / x for x = learning rate times mu."""
    return np.asarray((1.0 - (1.0 - pull) ** steps) / pull)
