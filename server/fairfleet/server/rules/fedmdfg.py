"""FedMDFG: a common descent direction that turns towards equal losses when the losses drift apart.

Pan, Wang, Li, Zhou, Lin: FedMDFG: Federated Learning with Multi-Gradient Descent and Fair Guidance, AAAI 2023.
The direction is here, and its line search: clients try steps that are halved again and again, and tell their losses.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np
from pydantic import Field

from fairfleet.server.minnorm import min_norm_on_simplex
from fairfleet.server.rules.algebra import ZERO, length, uniform, vanishes
from fairfleet.server.rules.base import Cohort, Found, Needs, Rule, State, Step, Trials, Vector

MOST_HALVINGS = 32  # in one line search, however short the shortest combination is


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
    line_search: bool = True

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
        slopes = dict(zip(cohort.clients, (cohort.gram.whole[:m] @ coefficients).tolist(), strict=True))
        line = Line(self.s, self.beta, found.stretch, guided, absent=bool(left), slopes=slopes)
        return Step(
            coefficients,
            status=found.status,
            state=FedMDFGState(expected=state.expected | expected, mean_norm=mu),
            notes={"guided": guided, "angle_deg": angle, "absent": bool(left), "stretch": found.stretch},
            trials=line.trials() if self.line_search and found.stretch else None,
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


class Shortest(NamedTuple):
    coefficients: Vector
    stretch: float = 0.0  # from the shortest combination to the step
    status: str = "ok"


def direction(gram: Vector, clients: int, guide: Vector | None) -> Shortest:
    """The shortest combination of the rows and the guide, as long as the clients' mean."""
    zero, mean = np.zeros(len(gram)), uniform(clients, len(gram))
    members = [line for line, square in zip(np.eye(len(gram)), np.diagonal(gram), strict=True) if square > 0.0]
    if guide is not None:
        fair = np.zeros(len(gram))
        fair[:clients] = guide
        members += [] if vanishes(fair, gram) else [fair]
    if not members:
        return Shortest(zero, status="stationary")
    lines = np.array(members)
    products = lines @ gram @ lines.T
    weights = min_norm_on_simplex(products).weights
    if vanishes(weights, products):
        return Shortest(zero, status="pareto_stationary")
    if vanishes(mean, gram):
        return Shortest(zero, status="zero_mean")
    stretch = length(mean, gram) / length(weights, products)
    return Shortest(weights @ lines * stretch, stretch)


@dataclass(frozen=True)
class Line:
    """Along which the losses are tried: rates from 2^s (1 if a client left) down to 2^-s / stretch times the usual."""

    s: int
    beta: float
    stretch: float
    guided: bool
    absent: bool
    slopes: Mapping[str, float]  # g_k . d

    def trials(self) -> Trials:
        doublings = 0 if self.absent else self.s
        halvings = doublings + self.s + math.floor(math.log2(self.stretch))
        return Trials(min(max(halvings, 0), MOST_HALVINGS), doublings, self.search)

    def search(self, clients: Sequence[str], before: Vector, after: Vector, *, rate: float) -> Found | None:
        """The first trial that lowers every loss as the slopes promise and, if guided, makes them more equal.

        Else the longest that lowers their sum; else the one with the lowest, of equals the shortest. None where
        every sum is infinite: such losses say nothing of any length.
        """
        slopes, longest = np.array([self.slopes[client] for client in clients]), rate * self.trials().factor(0)
        equal, total = equality(before), before.sum()
        for halvings, losses in enumerate(after):
            falls = bool((before - losses >= longest * 2.0**-halvings * self.beta * slopes).all())
            if falls and (not self.guided or equality(losses) > equal):
                return Found(halvings, accepted=True)
        sums = after.sum(axis=1)
        lower = np.flatnonzero(sums < total)
        if len(lower):
            return Found(int(lower[0]), accepted=False)
        lowest = np.flatnonzero(np.isfinite(sums) & (sums == sums.min()))
        return Found(int(lowest[-1]), accepted=False) if len(lowest) else None
