"""FedFV: each client's update is projected off the updates with which it conflicts.

The clients with the largest losses keep their updates. Wang, Fan, Qi, Wen, Wang, Yu: Federated
Learning with Fair Averaging, IJCAI 2021.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from fairfleet.server.rules.base import Rule, State, Step
from fairfleet.server.rules.cohort import Cohort, Indices, Vector
from fairfleet.server.rules.solvers.algebra import ZERO, length, uniform, vanishes

NOISE = 1e-7  # a length below this share of its terms is rounding


class FedFV(Rule):
    """The mean of the projected updates, then projected off conflicts with absent clients.

    Absent clients count for `tau` rounds. A share of about `alpha` of the clients, those with the
    largest losses, keep their updates.
    """

    summary: ClassVar[str] = (
        "projects conflicting updates, present and past; clients with large losses keep theirs"
    )
    alpha: float = Field(default=0.1, ge=0.0, le=1.0)
    tau: int = Field(default=0, ge=0)
    # The order of the projection targets; the paper compares others with the one by loss.
    order: Literal["loss", "random", "reverse"] = "loss"
    seed: int = Field(default=0, ge=0)  # of the random order, which is another in each round

    def window(self, known_clients: int, clients: int) -> int:
        """Return tau: for so many rounds an absent client's update is avoided."""
        return self.tau

    def step(self, cohort: Cohort, state: State) -> Step:
        """Return the projected mean, as long as the plain mean of the updates."""
        gram, m = cohort.gram.whole, len(cohort)
        ascending = np.argsort(cohort.losses, kind="stable")
        unprojected = ascending[m - unprojected_count(self.alpha, m) :]
        order = self._targets(ascending, cohort.round)
        total = np.zeros(len(gram))
        total[:m] = project(gram[:m, :m], order, unprojected).mean(axis=0)
        if 0 < self.tau <= cohort.round:
            total = project_off_absent(total, gram, self._past_rounds(cohort))
        mean = uniform(m, len(gram))
        notes = {"order": order.tolist(), "kept": sorted(unprojected.tolist())}
        if vanishes(total, gram, NOISE):
            return Step(np.zeros(len(gram)), status="pareto_stationary", notes=notes)
        if vanishes(mean, gram, NOISE):
            return Step(np.zeros(len(gram)), status="zero_mean", notes=notes)
        return Step(total * length(mean, gram) / length(total, gram), notes=notes)

    def _targets(self, ascending: Indices, round_number: int) -> Indices:
        """Return the clients in the order in which others are projected off their updates."""
        match self.order:
            case "random":
                return np.random.default_rng([self.seed, round_number]).permutation(len(ascending))
            case "reverse":
                return ascending[::-1]
        return ascending

    def _past_rounds(self, cohort: Cohort) -> list[Indices]:
        """Return the rows of absent clients of each of the last tau rounds, oldest round first."""
        age = {
            len(cohort) + index: cohort.round - cohort.history[index].round
            for index in cohort.absent()
        }
        return [
            np.array([row for row in age if age[row] == i], dtype=np.intp)
            for i in range(self.tau, 0, -1)
        ]


def unprojected_count(alpha: float, clients: int) -> int:
    """Return how many of the clients with the largest losses keep their update."""
    return 0 if alpha == 0.0 else clients - ceil((clients - 1) * (1.0 - alpha) - 1e-9)


def project(gram: Vector, order: Indices, unprojected: Indices) -> Vector:
    """Return the coefficients of the projected updates, one line per client.

    Each client starts from its own update. In the given order, it is projected off the *original*
    update of every client with which it then conflicts. All clients are processed together for
    each position of the order.
    """
    coefficients, products = np.eye(len(gram)), gram.copy()
    is_projected = np.ones(len(gram), bool)
    is_projected[unprojected] = False
    # No client is projected off an update that is zero.
    for j in order[np.diagonal(gram)[order] > ZERO**2]:
        conflict = is_projected & (products[:, j] < 0.0)
        conflict[j] = False
        part = products[conflict, j] / gram[j, j]
        coefficients[conflict, j] -= part
        products[conflict] -= np.outer(part, gram[j])
    return coefficients


def project_off_absent(total: Vector, gram: Vector, rounds: Sequence[Indices]) -> Vector:
    """Project the combination, round by round, off the sum of the absent updates in conflict."""
    total, products = total.copy(), gram @ total
    for rows in rounds:
        conflict = rows[products[rows] < 0.0]
        if not len(conflict):
            continue
        square = gram[np.ix_(conflict, conflict)].sum()
        if square > ZERO**2:
            part = products[conflict].sum() / square
            total[conflict] -= part
            products = products - part * gram[:, conflict].sum(axis=1)
    return total
