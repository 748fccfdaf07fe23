"""Rules that only choose weights: a client with a larger loss, or served less, weighs more.

q-FedAvg: Li et al., ICLR 2020. AFL: Mohri et al., ICML 2019. TERM: Li et al., ICLR 2021. DRFL:
Zhao and Joshi, ICASSP 2022. FedGini: Li et al., 2023. FedFa: Huang et al., 2020. EXPERIMENTS.md
says which reading of each paper is implemented. No rule of this module needs inner products.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from pydantic import Field

from fairfleet.server.rules.base import Losses, Needs, Rule, State, Step
from fairfleet.server.rules.cohort import Cohort, Vector, Weighting


class QFedAvg(Rule):
    """d = sum F^q L g_k / sum (q F^(q-1) |L g_k|^2 + L F^q), L = 1 / local learning rate."""

    summary: ClassVar[str] = (
        "weights grow with the loss to the power q; the step size follows from it"
    )
    q: float = Field(default=1.0, ge=0.0)
    local_lr: float | None = Field(default=None, gt=0.0)  # None: as the clients report it
    loss_eps: float = Field(default=1e-10, ge=0.0)  # added to every loss

    def needs(self) -> Needs:
        """Return that local learning rates are needed unless given, and losses >= 0."""
        reports = () if self.local_lr else ("local_lr",)
        return Needs(reports=reports, losses=self._losses(), positive=reports, products=False)

    def _losses(self) -> Losses:
        """Return the losses with a defined formula.

        F^q needs F >= 0. F^(q-1) with q < 1 divides by F, which `loss_eps` keeps above zero.
        """
        if self.q == 0.0:
            return "any"
        return "positive" if self.q < 1.0 and self.loss_eps == 0.0 else "non_negative"

    def step(self, cohort: Cohort, state: State) -> Step:
        """Return the coefficients, with all powers relative to the largest loss.

        Numerator and denominator are divided by its q-th power, so neither overflows.
        """
        q, losses = self.q, cohort.losses + self.loss_eps
        if q == 0.0:
            losses = np.ones(len(cohort))  # F^0 is one, whatever the sign of F
        lipschitz = 1.0 / (
            np.full(len(cohort), self.local_lr) if self.local_lr else cohort.reported("local_lr")
        )
        largest = float(losses.max())
        if largest == 0.0:
            return Step(np.zeros(len(cohort)), status="all_losses_zero")
        raised = (losses / largest) ** q
        slope = (losses / largest) ** (q - 1.0) / largest
        curvature = q * slope * (lipschitz * cohort.own.norms) ** 2 if q else np.zeros(len(cohort))
        return Step(raised * lipschitz / (curvature + lipschitz * raised).sum())


class AFLState(State):
    """The adversary's weights, by client id."""

    weights: dict[str, float] = Field(default_factory=dict)


class AFL(Rule):
    """d = sum lam_k g_k, then lam <- projection of lam + lr_lambda F on the simplex."""

    summary: ClassVar[str] = "plays against an adversary that shifts weight to the largest losses"
    Memory: ClassVar[type[State]] = AFLState
    lr_lambda: float = Field(default=0.1, ge=0.0)

    def needs(self) -> Needs:
        """Return that no inner products are needed."""
        return Needs(products=False)

    def step(self, cohort: Cohort, state: AFLState) -> Step:
        """Return the stored weights as coefficients, and the weights for the next round.

        A new client starts with the mean of the stored weights. Absent clients keep theirs.
        """
        usual = float(np.mean(list(state.weights.values()))) if state.weights else 1.0
        before = np.array([state.weights.get(client, usual) for client in cohort.clients])
        if before.sum() <= 0.0:
            before = np.ones(len(cohort))
        lam = before / before.sum()
        # A constant added to all losses changes nothing, so the largest is taken as zero.
        lead = self.lr_lambda * (cohort.losses - cohort.losses.max())
        after = project_on_simplex(lam + lead) * before.sum()
        weights = state.weights | dict(zip(cohort.clients, after.tolist(), strict=True))
        return Step(lam, state=AFLState(weights=weights), notes={"lam": lam})


def project_on_simplex(point: Vector) -> Vector:
    """Return the nearest weights that are not negative and add up to one."""
    # Subtracting the largest entry keeps the projection and the digits next to a huge loss.
    point = point - point.max()
    descending = np.sort(point)[::-1]
    excess = (np.cumsum(descending) - 1.0) / np.arange(1, len(point) + 1)
    return np.asarray(np.maximum(point - excess[np.flatnonzero(descending > excess)[-1]], 0.0))


class TERM(Rule):
    """lam_k ~ w_k exp(t F_k)."""

    summary: ClassVar[str] = "weights grow exponentially with the loss (tilted losses)"
    t: float = 1.0
    weighting: Weighting = "uniform"

    def needs(self) -> Needs:
        """Return that no inner products are needed."""
        return Needs(products=False)

    def step(self, cohort: Cohort, state: State) -> Step:
        """Return the tilted weights. Exponents are shifted to at most zero: none overflows."""
        losses = cohort.losses
        tilted = self.t * (losses - (losses.max() if self.t >= 0.0 else losses.min()))
        lam = cohort.weights(self.weighting) * np.exp(tilted)
        return Step(lam / lam.sum())


class TERMSmoothedState(State):
    """The running estimate of the normaliser."""

    estimate: float = 0.0


class TERMSmoothed(Rule):
    """TERM as in the authors' code, with a running estimate of the normaliser.

    e_k = exp(t (F_k - max F)), est = est/2 + mean(e)/2, d = sum e_k g_k / (est m^2).
    """

    summary: ClassVar[str] = "TERM with the authors' running estimate of the normaliser"
    Memory: ClassVar[type[State]] = TERMSmoothedState
    t: float = Field(default=1.0, ge=0.0)

    def needs(self) -> Needs:
        """Return that no inner products are needed."""
        return Needs(products=False)

    def step(self, cohort: Cohort, state: TERMSmoothedState) -> Step:
        """Return the tilted weights over the new estimate, and that estimate."""
        e = np.exp(self.t * (cohort.losses - cohort.losses.max()))
        estimate = 0.5 * state.estimate + 0.5 * float(e.mean())
        return Step(e / (estimate * len(cohort) ** 2), state=TERMSmoothedState(estimate=estimate))


class DRFL(Rule):
    """lam_k ~ w_k F_k^q."""

    summary: ClassVar[str] = "weights proportional to a power of the loss"
    q: float = Field(default=1.0, ge=0.0)
    weighting: Weighting = "uniform"

    def needs(self) -> Needs:
        """Return that losses may not be negative unless q is zero."""
        return Needs(losses="non_negative" if self.q else "any", products=False)

    def step(self, cohort: Cohort, state: State) -> Step:
        """Return the weights. Losses are divided by the largest, so no power overflows."""
        base, losses = cohort.weights(self.weighting), cohort.losses
        if self.q == 0.0:
            return Step(base)
        lam = base * (losses / (losses.max() or 1.0)) ** self.q
        if lam.sum() <= 0.0:
            return Step(base, status="all_losses_zero")
        return Step(lam / lam.sum())


class FedGini(Rule):
    """w_r ~ 1 + (1 - epsilon) r (r + 1) / D, D = (m - 1) m (m + 1) / 3.

    r is the rank of the loss among m clients, 0 for the smallest.
    """

    summary: ClassVar[str] = "weights by rank of the loss, after the Gini coefficient"
    epsilon: float = Field(default=0.5, ge=0.0, le=1.0)

    def needs(self) -> Needs:
        """Return that no inner products are needed."""
        return Needs(products=False)

    def step(self, cohort: Cohort, state: State) -> Step:
        """Return the weights by rank; equal losses are ranked in the order of client ids."""
        m = len(cohort)
        rank = np.empty(m)
        rank[np.argsort(cohort.losses, kind="stable")] = np.arange(m)
        divisor = max((m - 1) * m * (m + 1) / 3.0, 1.0)
        weights = 1.0 + (1.0 - self.epsilon) * rank * (rank + 1.0) / divisor
        return Step(weights / weights.sum())


class FedFa(Rule):
    """p = (1 - beta) A + beta B, followed by server momentum.

    A is the information in the clients' shares of accuracy, -log2(share + eps_acc), normalised.
    B is that in their shares of participations, -log2(1 - share + eps_freq), normalised.
    """

    summary: ClassVar[str] = (
        "weights by the information in accuracies and participations, with server momentum"
    )
    beta: float = Field(default=0.5, ge=0.0, le=1.0)
    eps_acc: float = Field(default=1e-6, gt=0.0)
    eps_freq: float = Field(default=1e-5, gt=0.0)

    def needs(self) -> Needs:
        """Return that clients must report accuracy and participations."""
        return Needs(reports=("accuracy", "participations"), products=False)

    def step(self, cohort: Cohort, state: State) -> Step:
        """Return the weights p as coefficients."""
        accuracy, participations = cohort.reported("accuracy"), cohort.reported("participations")
        a = _normalised(-np.log2(_shares_or_uniform(accuracy) + self.eps_acc))
        b = _normalised(-np.log2(1.0 - _shares_or_uniform(participations) + self.eps_freq))
        return Step((1.0 - self.beta) * a + self.beta * b)


def _shares_or_uniform(values: Vector) -> Vector:
    """Return the values divided by their sum, or equal shares if the sum is not positive."""
    return values / values.sum() if values.sum() > 0.0 else np.full(len(values), 1.0 / len(values))


def _normalised(information: Vector) -> Vector:
    """Return the values divided by their sum, or equal shares if the sum is zero."""
    if information.sum():
        return np.asarray(information / information.sum())
    return _shares_or_uniform(np.ones(len(information)))
