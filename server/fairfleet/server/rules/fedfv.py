"""FedFV: each client's update gives way to those it conflicts with, the worst-served clients' excepted.

Wang, Fan, Qi, Wen, Wang, Yu: Federated Learning with Fair Averaging, IJCAI 2021.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import ClassVar

import numpy as np
from pydantic import Field

from fairfleet.server.rules.algebra import length, uniform, vanishes
from fairfleet.server.rules.base import Cohort, Places, Rule, State, Step, Vector

NOISE = 1e-7  # below this share of its terms a length is rounding


class FedFV(Rule):
    """Internal conflicts are projected away, then those with clients absent for at most tau rounds."""

    summary: ClassVar[str] = "projects conflicting updates, present and past; clients with large losses keep theirs"
    alpha: float = Field(default=0.1, ge=0.0, le=1.0)
    tau: int = Field(default=0, ge=0)

    def window(self, known: int, clients: int) -> int:
        return self.tau

    def step(self, cohort: Cohort, state: State) -> Step:
        gram, m = cohort.gram.whole, len(cohort)
        order = np.argsort(cohort.losses, kind="stable")
        kept = order[m - kept_count(self.alpha, m) :]
        total = np.zeros(len(gram))
        total[:m] = project(gram[:m, :m], order, kept).mean(axis=0)
        if 0 < self.tau <= cohort.round:
            total = yield_to_absent(total, gram, self._past_rounds(cohort))
        mean = uniform(m, len(gram))
        notes = {"order": order.tolist(), "kept": sorted(kept.tolist())}
        if vanishes(total, gram, NOISE):
            return Step(np.zeros(len(gram)), status="pareto_stationary", notes=notes)
        if vanishes(mean, gram, NOISE):
            return Step(np.zeros(len(gram)), status="zero_mean", notes=notes)
        return Step(total * length(mean, gram) / length(total, gram), notes=notes)

    def _past_rounds(self, cohort: Cohort) -> list[Places]:
        """Rows of absent clients from each of the last tau rounds, the oldest round first."""
        age = {len(cohort) + at: cohort.round - cohort.history[at].round for at in cohort.absent()}
        return [np.array([row for row in age if age[row] == i], dtype=np.intp) for i in range(self.tau, 0, -1)]


def kept_count(alpha: float, clients: int) -> int:
    """How many of the clients with the largest losses keep their update."""
    return 0 if alpha == 0.0 else clients - ceil((clients - 1) * (1.0 - alpha) - 1e-9)


def project(gram: Vector, order: Places, kept: Places) -> Vector:
    """Coefficients of the projected updates, one line per client.

    Each client starts from its own update and gives way to the *original* update of every client it then
    conflicts with, in ascending order of loss. All clients take the same step of the order together.
    """
    coefficients, products = np.eye(len(gram)), gram.copy()
    gives_way = np.ones(len(gram), bool)
    gives_way[kept] = False
    for j in order:
        conflict = gives_way & (products[:, j] < 0.0)
        conflict[j] = False
        part = products[conflict, j] / gram[j, j]
        coefficients[conflict, j] -= part
        products[conflict] -= np.outer(part, gram[j])
    return coefficients


def yield_to_absent(total: Vector, gram: Vector, rounds: Sequence[Places]) -> Vector:
    """Gives way to the sum of the absent clients' updates that conflict, round by round."""
    total, products = total.copy(), gram @ total
    for rows in rounds:
        conflict = rows[products[rows] < 0.0]
        if not len(conflict):
            continue
        square = gram[np.ix_(conflict, conflict)].sum()
        if square > 0.0:
            part = products[conflict].sum() / square
            total[conflict] -= part
            products = products - part * gram[:, conflict].sum(axis=1)
    return total
