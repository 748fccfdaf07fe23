"""FedMDFG: a common descent direction, guided towards equal losses when they drift apart.

Pan, Wang, Li, Zhou, Lin: FedMDFG: Federated Learning with Multi-Gradient Descent and Fair
Guidance, AAAI 2023. This module has the direction and its line search: clients try steps that
are halved again and again, and report their losses.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np
from pydantic import Field

from fairfleet.server.rules.base import LineSearchResult, Needs, Rule, State, Step, StepTrials
from fairfleet.server.rules.cohort import Cohort, Vector
from fairfleet.server.rules.solvers.algebra import ZERO, length, scaled_down, uniform, vanishes
from fairfleet.server.rules.solvers.min_norm import min_norm_on_simplex

MAX_HALVINGS = 32  # in one line search, however short the shortest combination is


class Expectation(State):
    """A client's running expectation of its loss."""

    loss: float
    participations: int = 1


class FedMDFGState(State):
    """The clients' expectations, and the length to which the last round's updates were scaled."""

    expected: dict[str, Expectation] = Field(default_factory=dict)  # by client id
    mean_norm: float = 0.0


class FedMDFG(Rule):
    """The min-norm direction over updates of equal length, with fair guidance.

    Clients that left since the last round take part with their last update. Guidance is active if
    the angle between the losses and the all-ones vector exceeds `theta_deg` degrees, or if some
    but not all losses rose above their expectations. The line search (`SearchLine`) tries up to
    2^s times the optimizer's step; an accepted trial lowers each loss by at least `beta` times the
    decrease that its slope promises.
    """

    summary: ClassVar[str] = (
        "common descent with guidance to equal losses; line search by trial losses"
    )
    Memory: ClassVar[type[State]] = FedMDFGState
    theta_deg: float = Field(default=11.25, ge=0.0, le=90.0)
    s: int = Field(default=5, ge=0)
    beta: float = Field(default=1e-4, ge=0.0)
    line_search: bool = True

    def needs(self) -> Needs:
        """Return that losses may not be negative: fairness is an angle between losses."""
        return Needs(line_search=self.line_search, losses="non_negative")

    def window(self, known_clients: int, clients: int) -> int:
        """Return 1: only the rows of the last round are used."""
        return 1

    def step(self, cohort: Cohort, state: FedMDFGState) -> Step:
        """Return the guided direction, the updated expectations and the trials."""
        expected, rises = self.expectations(cohort, state)
        m, angle = len(cohort), float(np.degrees(np.arccos(equality(cohort.losses))))
        guided = angle > self.theta_deg or 0 < rises < m
        departed = [
            index for index in cohort.absent() if cohort.history[index].round == cohort.round - 1
        ]
        rows = [*range(m), *(m + index for index in departed)]
        mu = float(cohort.own.norms.mean())
        guide = guidance(cohort.losses) if guided else None
        shortest = equal_length_direction(cohort, rows, mu, state.mean_norm or mu, guide)
        stretch, absent = shortest.stretch, bool(departed)
        slopes = cohort.gram.whole[:m] @ shortest.coefficients
        by_client = dict(zip(cohort.clients, slopes.tolist(), strict=True))
        line = SearchLine(self.s, self.beta, stretch, guided, absent=absent, slopes=by_client)
        return Step(
            shortest.coefficients,
            status=shortest.status,
            state=FedMDFGState(expected=state.expected | expected, mean_norm=mu),
            notes={"guided": guided, "angle_deg": angle, "absent": absent, "stretch": stretch},
            trials=line.trials() if self.line_search and stretch else None,
        )

    def expectations(
        self, cohort: Cohort, state: FedMDFGState
    ) -> tuple[dict[str, Expectation], int]:
        """Return the clients' expectations after this round, and how many losses rose above them.

        The expectation of a loss that did not rise becomes a running mean over participations.
        """
        after, rises = {}, 0
        for client, loss in zip(cohort.clients, cohort.losses.tolist(), strict=True):
            before = state.expected.get(client)
            if before is None:
                after[client] = Expectation(loss=loss)
                continue
            participations, mean = before.participations + 1, before.loss
            if loss > before.loss:
                rises += 1
            else:
                # This form of the mean needs no sum that may overflow.
                mean = before.loss + (loss - before.loss) / participations
            after[client] = Expectation(loss=mean, participations=participations)
        return after, rises


def equality(losses: Vector) -> float:
    """Return the cosine between the losses and the all-ones vector: one if they are equal.

    Returns -1 for the losses of a trial that diverged.
    """
    if not np.isfinite(losses).all():
        return -1.0
    small, _ = scaled_down(losses)
    size = float(np.linalg.norm(small)) * len(losses) ** 0.5
    return float(np.clip(small.sum() / size, -1.0, 1.0)) if size else 1.0


def guidance(losses: Vector) -> Vector | None:
    """Return h, the unit vector against which the losses become more equal.

    Returns None if they are equal or zero.
    """
    small, _ = scaled_down(losses)
    size = float(np.linalg.norm(small))
    if size == 0.0:
        return None
    fractions, p = small / size, np.full(len(losses), len(losses) ** -0.5)
    h = (fractions @ p) * fractions - p
    norm = float(np.linalg.norm(h))
    return np.asarray(h / norm) if norm > 1e-12 else None


class ShortestDirection(NamedTuple):
    """A direction as coefficients of rows."""

    coefficients: Vector
    stretch: float = 0.0  # the factor from the shortest combination to this direction
    status: str = "ok"


def equal_length_direction(
    cohort: Cohort, rows: Sequence[int], mu: float, past_mu: float, guide: Vector | None
) -> ShortestDirection:
    """Return the direction over these rows, as coefficients of all rows of the cohort.

    The clients' updates are scaled to length mu. The updates of departed clients are scaled to
    past_mu, the length with which they counted in their own round.
    """
    gram, m = cohort.gram.of(rows), len(cohort)
    sizes = np.where(np.arange(len(rows)) < m, mu, past_mu)
    scale = np.divide(sizes, gram.norms, out=np.zeros(len(rows)), where=gram.norms > ZERO)
    shortest = direction(gram.whole * np.outer(scale, scale), m, guide)
    coefficients = np.zeros(len(cohort.gram))
    coefficients[rows] = shortest.coefficients * scale
    return shortest._replace(coefficients=coefficients)


def direction(gram: Vector, clients: int, guide: Vector | None) -> ShortestDirection:
    """Return the shortest combination of the rows and the guide, as long as the clients' mean."""
    zero, mean = np.zeros(len(gram)), uniform(clients, len(gram))
    members = [
        line
        for line, square in zip(np.eye(len(gram)), np.diagonal(gram), strict=True)
        if square > 0.0
    ]
    if guide is not None:
        fair = np.zeros(len(gram))
        fair[:clients] = guide
        members += [] if vanishes(fair, gram) else [fair]
    if not members:
        return ShortestDirection(zero, status="stationary")
    lines = np.array(members)
    products = lines @ gram @ lines.T
    weights = min_norm_on_simplex(products).weights
    if vanishes(weights, products):
        return ShortestDirection(zero, status="pareto_stationary")
    if vanishes(mean, gram):
        return ShortestDirection(zero, status="zero_mean")
    stretch = length(mean, gram) / length(weights, products)
    return ShortestDirection(weights @ lines * stretch, stretch)


@dataclass(frozen=True)
class SearchLine:
    """The line along which clients try steps.

    The rates go from 2^s times the usual one (1 if a client left) down to 2^-s / stretch.
    """

    s: int
    beta: float
    stretch: float
    guided: bool
    absent: bool  # whether a client left since the last round
    slopes: Mapping[str, float]  # g_k . d, by client

    def trials(self) -> StepTrials:
        """Return the trials that clients must evaluate."""
        doublings = 0 if self.absent else self.s
        halvings = doublings + self.s + math.floor(math.log2(self.stretch))
        return StepTrials(min(max(halvings, 0), MAX_HALVINGS), doublings, self.search)

    def search(
        self, clients: Sequence[str], before: Vector, after: Vector, *, rate: float
    ) -> LineSearchResult | None:
        """Return the first trial that lowers every loss as its slope promises.

        If guided, it must also make the losses more equal. Otherwise return the longest trial that
        lowers their sum; otherwise the one with the lowest sum, of equals the shortest. Return
        None where every sum is infinite: such losses say nothing about any length.
        """
        slopes = np.array([self.slopes[client] for client in clients])
        longest = rate * self.trials().factor(0)
        after = np.maximum(after, 0.0)  # the rule is defined only for such losses
        equal, total = equality(before), before.sum()
        for halvings, losses in enumerate(after):
            falls = bool((before - losses >= longest * 2.0**-halvings * self.beta * slopes).all())
            if falls and (not self.guided or equality(losses) > equal):
                return LineSearchResult(halvings, accepted=True)
        sums = after.sum(axis=1)
        lower = np.flatnonzero(sums < total)
        if len(lower):
            return LineSearchResult(int(lower[0]), accepted=False)
        lowest = np.flatnonzero(np.isfinite(sums) & (sums == sums.min()))
        return LineSearchResult(int(lowest[-1]), accepted=False) if len(lowest) else None
