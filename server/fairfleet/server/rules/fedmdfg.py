"""FedMDFG: a common descent direction that turns towards equal losses when the losses drift apart.

Pan, Wang, Li, Zhou, Lin: FedMDFG: Federated Learning with Multi-Gradient Descent and Fair Guidance, AAAI 2023.
The direction is here; its line search needs losses of trial models, which come through a callback.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, NamedTuple

import numpy as np
from pydantic import Field

from fairfleet.server.minnorm import min_norm_on_simplex
from fairfleet.server.rules.algebra import ZERO, length, uniform, vanishes
from fairfleet.server.rules.base import Cohort, Needs, Rule, State, Step, Vector


class Expectation(State):
    """A client's running expectation of its loss."""

    loss: float
    participations: int = 1


class FedMDFGState(State):
    expected: dict[str, Expectation] = Field(default_factory=dict)
    mean_norm: float = 0.0  # of the last round's updates, to which they were scaled


class FedMDFG(Rule):
    """Min-norm direction over equally long updates, fair guidance, and clients that left since the last round."""

    summary: ClassVar[str] = "common descent with guidance to equal losses; line search by trial losses"
    Memory: ClassVar[type[State]] = FedMDFGState
    theta_deg: float = Field(default=11.25, ge=0.0, le=90.0)
    s: int = Field(default=5, ge=0)
    beta: float = Field(default=1e-4, ge=0.0)
    line_search: bool = False

    def needs(self) -> Needs:
        return Needs(line_search=self.line_search)

    def window(self, known: int, clients: int) -> int:
        return 1

    def step(self, cohort: Cohort, state: FedMDFGState) -> Step:
        expected, rises = self.expectations(cohort, state)
        m, angle = len(cohort), float(np.degrees(np.arccos(equality(cohort.losses))))
        guided = angle > self.theta_deg or 0 < rises < m
        left = [at for at in cohort.absent() if cohort.history[at].round == cohort.round - 1]
        rows = [*range(m), *(m + at for at in left)]
        gram = cohort.gram.of(rows)
        mu = float(gram.norms[:m].mean())
        # a client that left enters as long as it counted in its own round
        lengths = np.where(np.arange(len(rows)) < m, mu, state.mean_norm or mu)
        scale = np.divide(lengths, gram.norms, out=np.zeros(len(rows)), where=gram.norms > ZERO)
        found = direction(gram.whole * np.outer(scale, scale), m, guidance(cohort.losses) if guided else None)
        coefficients = np.zeros(len(cohort.gram))
        coefficients[rows] = found.coefficients * scale
        return Step(
            coefficients,
            status=found.status,
            state=FedMDFGState(expected=state.expected | expected, mean_norm=mu),
            notes={"guided": guided, "angle_deg": angle, "absent": bool(left), "stretch": found.stretch},
        )

    def expectations(self, cohort: Cohort, state: FedMDFGState) -> tuple[dict[str, Expectation], int]:
        """The clients' expectations after this round, and how many losses rose above theirs."""
        after, rises = {}, 0
        for client, loss in zip(cohort.clients, cohort.losses.tolist(), strict=True):
            before = state.expected.get(client)
            if before is None:
                after[client] = Expectation(loss=loss)
                continue
            turns, mean = before.participations + 1, before.loss
            if loss > before.loss:
                rises += 1
            else:
                mean = (before.loss * before.participations + loss) / turns
            after[client] = Expectation(loss=mean, participations=turns)
        return after, rises


def equality(losses: Vector) -> float:
    """The cosine between the losses and the all-ones vector: one if they are equal."""
    size = float(np.linalg.norm(losses)) * len(losses) ** 0.5
    return float(np.clip(losses.sum() / size, -1.0, 1.0)) if size else 1.0


def guidance(losses: Vector) -> Vector | None:
    """h: the unit vector against which the losses become more equal."""
    size = float(np.linalg.norm(losses))
    if size == 0.0:
        return None
    fractions, p = losses / size, np.full(len(losses), len(losses) ** -0.5)
    h = (fractions @ p) * fractions - p
    norm = float(np.linalg.norm(h))
    return np.asarray(h / norm) if norm > 1e-12 else None


class Found(NamedTuple):
    coefficients: Vector
    stretch: float = 0.0  # from the shortest combination to the step
    status: str = "ok"


def direction(gram: Vector, clients: int, guide: Vector | None) -> Found:
    """The shortest combination of the rows and the guide, as long as the clients' mean."""
    zero, mean = np.zeros(len(gram)), uniform(clients, len(gram))
    members = [line for line, square in zip(np.eye(len(gram)), np.diagonal(gram), strict=True) if square > 0.0]
    if guide is not None:
        fair = np.zeros(len(gram))
        fair[:clients] = guide
        members += [] if vanishes(fair, gram) else [fair]
    if not members:
        return Found(zero, status="stationary")
    lines = np.array(members)
    products = lines @ gram @ lines.T
    weights = min_norm_on_simplex(products).weights
    if vanishes(weights, products):
        return Found(zero, status="pareto_stationary")
    if vanishes(mean, gram):
        return Found(zero, status="zero_mean")
    stretch = length(mean, gram) / length(weights, products)
    return Found(weights @ lines * stretch, stretch)


class Rate(NamedTuple):
    rate: float
    losses: Vector
    accepted: bool


def line_search(
    losses_at: Callable[[float], Vector],
    losses: Vector,
    slopes: Vector,
    *,
    eta: float,
    rule: FedMDFG,
    stretch: float,
    guided: bool,
    absent: bool,
) -> Rate:
    """The first rate, halving, that lowers every loss as the slopes promise and, if guided, makes them more equal.

    losses_at(rate) are the clients' losses after a step of that rate; slopes are g_k . d.
    """
    start = eta if absent else 2.0**rule.s * eta
    last = 2.0**-rule.s * eta / stretch
    tried: list[Rate] = []
    while not tried or tried[-1].rate / 2.0 >= last:
        rate = tried[-1].rate / 2.0 if tried else start
        found = losses_at(rate)
        falls = bool((losses - found >= rate * rule.beta * slopes).all())
        if falls and (not guided or equality(found) > equality(losses)):
            return Rate(rate, found, accepted=True)
        tried.append(Rate(rate, found, accepted=False))
    lower = [rate for rate in tried if rate.losses.sum() < losses.sum()]
    return lower[0] if lower else min(tried, key=lambda rate: float(rate.losses.sum()))
