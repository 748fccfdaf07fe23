"""Rules that only choose weights, from losses, accuracies or turns: larger where a client is served worse.

q-FedAvg: Li et al., ICLR 2020. AFL: Mohri et al., ICML 2019. TERM: Li et al., ICLR 2021. DRFL: Zhao and Joshi,
ICASSP 2022. FedGini: Li et al., 2023. FedFa: Huang et al., 2020. EXPERIMENTS.md says which reading is taken.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from pydantic import Field

from fairfleet.server.rules.base import Cohort, Needs, Rule, State, Step, Vector, Weighting


class QFedAvg(Rule):
    """d = sum F^q L g_k / sum (q F^(q-1) |L g_k|^2 + L F^q), L = 1 / local learning rate"""

    summary: ClassVar[str] = "weights grow with the loss to the power q; the step size follows from it"
    q: float = Field(default=1.0, ge=0.0)
    local_lr: float | None = Field(default=None, gt=0.0)  # None: as the clients report it
    loss_eps: float = Field(default=1e-10, ge=0.0)

    def needs(self) -> Needs:
        return Needs(reports=() if self.local_lr else ("local_lr",))

    def step(self, cohort: Cohort, state: State) -> Step:
        q, losses = self.q, cohort.losses + self.loss_eps
        lipschitz = 1.0 / (np.full(len(cohort), self.local_lr) if self.local_lr else cohort.reported("local_lr"))
        raised = losses**q
        curvature = q * losses ** (q - 1.0) * (lipschitz * cohort.own.norms) ** 2 if q else np.zeros(len(cohort))
        return Step(raised * lipschitz / (curvature + lipschitz * raised).sum())


class AFLState(State):
    weights: dict[str, float] = Field(default_factory=dict)


class AFL(Rule):
    """d = sum lam_k g_k, then lam <- projection of lam + lr_lambda F on the simplex."""

    summary: ClassVar[str] = "plays against an adversary that shifts weight to the largest losses"
    Memory: ClassVar[type[State]] = AFLState
    lr_lambda: float = Field(default=0.1, ge=0.0)

    def step(self, cohort: Cohort, state: AFLState) -> Step:
        # a newcomer gets the mean of the known weights; who is away keeps theirs
        usual = float(np.mean(list(state.weights.values()))) if state.weights else 1.0
        held = np.array([state.weights.get(client, usual) for client in cohort.clients])
        if held.sum() <= 0.0:
            held = np.ones(len(cohort))
        lam = held / held.sum()
        after = project_on_simplex(lam + self.lr_lambda * cohort.losses) * held.sum()
        weights = state.weights | dict(zip(cohort.clients, after.tolist(), strict=True))
        return Step(lam, state=AFLState(weights=weights), notes={"lam": lam})


def project_on_simplex(point: Vector) -> Vector:
    """The nearest weights that are not negative and add up to one."""
    point = point - point.max()  # the same projection, and nothing is lost beside a huge loss
    descending = np.sort(point)[::-1]
    excess = (np.cumsum(descending) - 1.0) / np.arange(1, len(point) + 1)
    return np.asarray(np.maximum(point - excess[np.flatnonzero(descending > excess)[-1]], 0.0))


class TERM(Rule):
    """lam_k ~ w_k exp(t F_k)"""

    summary: ClassVar[str] = "weights grow exponentially with the loss (tilted losses)"
    t: float = 1.0
    weighting: Weighting = "uniform"

    def step(self, cohort: Cohort, state: State) -> Step:
        tilted = self.t * cohort.losses
        lam = cohort.weights(self.weighting) * np.exp(tilted - tilted.max())
        return Step(lam / lam.sum())


class TERMSmoothedState(State):
    estimate: float = 0.0


class TERMSmoothed(Rule):
    """e_k = exp(t (F_k - max F)), est = est/2 + mean(e)/2, d = sum e_k g_k / (est m^2): the authors' code"""

    summary: ClassVar[str] = "TERM with the authors' running estimate of the normaliser"
    Memory: ClassVar[type[State]] = TERMSmoothedState
    t: float = Field(default=1.0, ge=0.0)

    def step(self, cohort: Cohort, state: TERMSmoothedState) -> Step:
        e = np.exp(self.t * (cohort.losses - cohort.losses.max()))
        estimate = 0.5 * state.estimate + 0.5 * float(e.mean())
        return Step(e / (estimate * len(cohort) ** 2), state=TERMSmoothedState(estimate=estimate))


class DRFL(Rule):
    """lam_k ~ w_k F_k^q"""

    summary: ClassVar[str] = "weights proportional to a power of the loss"
    q: float = Field(default=1.0, ge=0.0)
    weighting: Weighting = "uniform"

    def step(self, cohort: Cohort, state: State) -> Step:
        base = cohort.weights(self.weighting)
        lam = base * cohort.losses**self.q
        if lam.sum() <= 0.0:
            return Step(base, status="all_losses_zero")
        return Step(lam / lam.sum())


class FedGini(Rule):
    """w_r ~ 1 + (1 - epsilon) r (r + 1) / D, D = (m - 1) m (m + 1) / 3, r = 0 for the smallest loss"""

    summary: ClassVar[str] = "weights by rank of the loss, after the Gini coefficient"
    epsilon: float = Field(default=0.5, ge=0.0, le=1.0)

    def step(self, cohort: Cohort, state: State) -> Step:
        m = len(cohort)
        rank = np.empty(m)
        rank[np.argsort(cohort.losses, kind="stable")] = np.arange(m)
        weights = 1.0 + (1.0 - self.epsilon) * rank * (rank + 1.0) / max((m - 1) * m * (m + 1) / 3.0, 1.0)
        return Step(weights / weights.sum())


class FedFa(Rule):
    """p = (1 - beta) A + beta B: information of the accuracies and of the numbers of turns. Momentum follows."""

    summary: ClassVar[str] = "weights by the information in accuracies and turns, with server momentum"
    beta: float = Field(default=0.5, ge=0.0, le=1.0)
    eps_acc: float = Field(default=1e-6, gt=0.0)
    eps_freq: float = Field(default=1e-5, gt=0.0)

    def needs(self) -> Needs:
        return Needs(reports=("accuracy", "participations"))

    def step(self, cohort: Cohort, state: State) -> Step:
        a = normalised(-np.log2(shares(cohort.reported("accuracy")) + self.eps_acc))
        b = normalised(-np.log2(1.0 - shares(cohort.reported("participations")) + self.eps_freq))
        return Step((1.0 - self.beta) * a + self.beta * b)


def shares(values: Vector) -> Vector:
    return values / values.sum() if values.sum() > 0.0 else np.full(len(values), 1.0 / len(values))


def normalised(information: Vector) -> Vector:
    return information / information.sum() if information.sum() else shares(np.ones(len(information)))
