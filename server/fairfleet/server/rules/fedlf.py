"""FedLF: in every layer, a direction that harms no client, present or absent, and makes the losses more equal.

Pan, Li, Yu, Wang, Tang, Zhao: FedLF: Layer-Wise Fair Federated Learning, AAAI 2024.
The fairness objective P = -cos(1, F) has the gradient sum q_k g_k, so it is one more row of the Gram matrix.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from fairfleet.server.minnorm import min_norm_on_simplex
from fairfleet.server.rules.algebra import ZERO, length, lengths, uniform, vanishes
from fairfleet.server.rules.base import Cohort, Needs, Rule, State, Step, Vector

Normalize = Literal["all_rows", "rows_then_p", "none"]
EQUAL = 1e-12  # losses this near to equal have no direction of fairness


class FedLF(Rule):
    """Min-norm direction per layer over clients, grad P and absent clients; vanishing layers are merged."""

    summary: ClassVar[str] = "layer by layer: no conflict with anyone, present or absent, and fairer losses"
    normalize: Normalize = "all_rows"
    use_p: bool = True
    history: bool = True
    zero_tol: float = Field(default=1e-6, gt=0.0)

    def needs(self) -> Needs:
        return Needs(layers=True)

    def window(self, known: int, clients: int) -> int:
        """About once around the fleet: tau = floor(M / |S|)."""
        return known // clients if self.history and known > clients else 0

    def step(self, cohort: Cohort, state: State) -> Step:
        m, tau = len(cohort), self.window(cohort.known, len(cohort))
        used = [at for at in cohort.absent() if 1 <= cohort.round - cohort.history[at].round <= tau]
        rows = [*range(m), *(m + at for at in used)]
        notes: dict[str, object] = {"hist_used": [cohort.history[at].client for at in used], "tau": tau}
        if len(rows) == 1:
            return Step(uniform(1, len(cohort.gram)), status="single_client", notes=notes)
        found = self.relaxed(cohort.gram.of(rows).layers, cohort.losses)
        per_layer = np.zeros((len(cohort.gram.layers), len(cohort.gram)))
        if found is None:
            return Step(per_layer, status="pareto_stationary", notes=notes)
        blocks, status = found
        for block in blocks:
            per_layer[block.first : block.last, rows[: len(block.gram)]] = block.coefficients
        notes["groups"] = [[block.first, block.last] for block in blocks]
        return as_long_as_the_mean(per_layer, cohort, status, notes)

    def relaxed(self, gram: Vector, losses: Vector) -> tuple[list[Block], str] | None:
        """If no direction serves everyone: without P, then without history, then without both."""
        m, rows = len(losses), len(gram[0])
        q = fairness_gradient(losses) if self.use_p else None
        dropped = "p_dropped" if self.use_p else "ok"
        tries = [(q, rows, "ok" if q is not None else dropped), (None, rows, dropped)]
        tries += [(q, m, "history_dropped"), (None, m, "p_and_history_dropped" if self.use_p else "history_dropped")]
        for with_q, size, status in tries:
            if blocks := solve_layers(gram[:, :size, :size], m, with_q, self.normalize, self.zero_tol):
                return blocks, status
        return None


def fairness_gradient(losses: Vector) -> Vector | None:
    """q, such that sum q_k g_k is the gradient of P = -cos(1, F). None if the losses are equal or zero."""
    size = float(np.linalg.norm(losses))
    if size == 0.0:
        return None
    direction, p = losses / size, np.full(len(losses), len(losses) ** -0.5)
    h = (direction @ p) * direction - p
    return h / size if np.linalg.norm(h) > EQUAL else None


@dataclass(frozen=True)
class Block:
    """Layers first..last-1, solved together. Coefficients are None where their direction vanishes."""

    first: int
    last: int
    gram: Vector
    coefficients: Vector | None


def solve_layers(
    gram: Vector, clients: int, q: Vector | None, normalize: Normalize, tolerance: float
) -> list[Block] | None:
    """Merges every layer whose direction vanishes with its neighbour until none does. None if all vanish together."""

    def solve(first: int, last: int, gram: Vector) -> Block:
        return Block(first, last, gram, layer_direction(gram, clients, q, normalize, tolerance))

    blocks = [solve(layer, layer + 1, one) for layer, one in enumerate(gram)]
    while lost := [at for at, block in enumerate(blocks) if block.coefficients is None]:
        if len(blocks) == 1:
            return None
        left = min(lost[0], len(blocks) - 2)
        one, other = blocks[left : left + 2]
        blocks[left : left + 2] = [solve(one.first, other.last, one.gram + other.gram)]
    return blocks


def layer_direction(
    gram: Vector, clients: int, q: Vector | None, normalize: Normalize, tolerance: float
) -> Vector | None:
    """The shortest convex combination of the clients' fragments, that of grad P and the absent clients'."""
    members = layer_members(gram, clients, q, normalize)
    if not len(members):
        return None
    products = members @ gram @ members.T
    weights = min_norm_on_simplex(products).weights
    return None if vanishes(weights, products, tolerance) else np.asarray(weights @ members)


def layer_members(gram: Vector, clients: int, q: Vector | None, normalize: Normalize) -> Vector:
    """The vectors of a layer's problem as coefficients of its rows, scaled to the clients' mean norm if asked."""
    norms = np.sqrt(np.diagonal(gram))
    mu = float(norms[:clients].mean())
    members = np.eye(len(gram))[norms > ZERO]
    if q is not None:
        fair = np.zeros(len(gram))
        fair[:clients] = q
        if normalize == "rows_then_p":
            fair = np.divide(fair * mu, norms, out=np.zeros(len(gram)), where=norms > ZERO)
        if not vanishes(fair, gram):
            members = np.vstack([members, fair])
    return members if normalize == "none" else members * mu / lengths(members, gram)[:, None]


def as_long_as_the_mean(per_layer: Vector, cohort: Cohort, status: str, notes: dict[str, object]) -> Step:
    mean, whole = uniform(len(cohort), len(cohort.gram)), cohort.gram.whole
    if vanishes(mean, whole):
        return Step(np.zeros_like(per_layer), status="zero_mean", notes=notes)
    square = sum(length(line, gram) ** 2 for line, gram in zip(per_layer, cohort.gram.layers, strict=True))
    return Step(per_layer * length(mean, whole) / square**0.5, status, notes=notes)
