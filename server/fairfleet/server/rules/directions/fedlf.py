"""FedLF: in every layer, a direction that harms no client and makes the losses more equal.

It considers the clients of the round and absent clients. Pan, Li, Yu, Wang, Tang, Zhao: FedLF:
Layer-Wise Fair Federated Learning, AAAI 2024. The fairness objective P = -cos(1, F) has the
gradient sum q_k g_k, so it is one more row of the Gram matrix.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from fairfleet.server.rules.base import Blocks, Needs, Rule, State, Step
from fairfleet.server.rules.cohort import Cohort, Indices, Vector
from fairfleet.server.rules.solvers.algebra import (
    ZERO,
    length,
    lengths,
    reach,
    scaled_down,
    uniform,
    vanishes,
)
from fairfleet.server.rules.solvers.corral import MANY_ROWS
from fairfleet.server.rules.solvers.min_norm import min_norm_on_simplex

Normalize = Literal["all_rows", "rows_then_p", "none"]
EQUAL = 1e-12  # losses this near to equal have no direction of fairness


class FedLF(Rule):
    """Per layer, the min-norm direction over the clients, grad P and the absent clients.

    A layer in which that direction vanishes is merged with its neighbour.
    """

    summary: ClassVar[str] = (
        "layer by layer: no conflict with anyone, present or absent, and fairer losses"
    )
    normalize: Normalize = "all_rows"  # which rows are scaled to the clients' mean length
    use_p: bool = True  # whether grad P is an objective
    history: bool = True  # whether absent clients are objectives
    # A layer is a module (weight and bias together), a tensor, or the model (one).
    layers: Literal["modules", "tensors", "one"] = "modules"
    zero_tol: float = Field(default=1e-6, gt=0.0)  # relative length at which a direction vanishes

    def needs(self) -> Needs:
        """Return that products per layer are needed; P is an angle between losses >= 0."""
        return Needs(
            layers=True, losses="non_negative" if self.use_p else "any", exact_losses=self.use_p
        )

    def blocks(self) -> Blocks:
        """Return the blocks that its layers are; they are modules where all become one."""
        return "tensors" if self.layers == "tensors" else "modules"

    def keeping_blocks(self, blocks: Blocks) -> FedLF:
        """Return the rule with these layers, unless its layers were given."""
        if "layers" in self.model_fields_set:
            return self
        return self.model_copy(update={"layers": blocks})

    def window(self, known_clients: int, clients: int) -> int:
        """Return tau = floor(M / |S|): about the rounds that it takes to select every client."""
        return known_clients // clients if self.history and known_clients > clients else 0

    def step(self, cohort: Cohort, state: State) -> Step:
        """Return one line of coefficients per layer, together as long as the mean update."""
        m, tau = len(cohort), self.window(cohort.known_clients, len(cohort))
        used = [
            index
            for index in cohort.absent()
            if 1 <= cohort.round - cohort.history[index].round <= tau
        ]
        rows = [*range(m), *(m + index for index in used)]
        names = [cohort.history[index].client for index in used]
        notes: dict[str, object] = {"hist_used": names, "tau": tau}
        if len(rows) == 1:
            return Step(uniform(1, len(cohort.gram)), status="single_client", notes=notes)
        gram = cohort.gram if len(rows) == len(cohort.gram) else cohort.gram.of(rows)
        layers = gram.layers.sum(axis=0, keepdims=True) if self.layers == "one" else gram.layers
        solution = self.relaxed(layers, cohort.losses)
        per_layer = np.zeros((len(cohort.gram.layers), len(cohort.gram)))
        if solution is None:
            return Step(per_layer, status="pareto_stationary", notes=notes)
        blocks, status = solution
        if self.layers == "one":
            blocks = [replace(blocks[0], last=len(gram.layers))]
        for block in blocks:
            per_layer[block.first : block.last, rows[: len(block.gram)]] = block.coefficients
        notes["groups"] = [[block.first, block.last] for block in blocks]
        return rescaled_to_mean(per_layer, cohort, status, notes)

    def relaxed(self, gram: Vector, losses: Vector) -> tuple[list[Block], str] | None:
        """Return the solved blocks and the status, or None if no direction serves the clients.

        If no direction serves all objectives, P is dropped, then the history, then both.
        `gram` has the shape (layers, rows, rows), the clients first.
        """
        m, rows = len(losses), len(gram[0])
        q = fairness_gradient(losses) if self.use_p else None
        dropped = "p_dropped" if self.use_p else "ok"
        tries = [(q, rows, "ok" if q is not None else dropped), (None, rows, dropped)]
        tries += [
            (q, m, "history_dropped"),
            (None, m, "p_and_history_dropped" if self.use_p else "history_dropped"),
        ]
        for with_q, size, status in tries:
            if blocks := solve_layers(
                gram[:, :size, :size], m, with_q, self.normalize, self.zero_tol
            ):
                return blocks, status
        return None


def fairness_gradient(losses: Vector) -> Vector | None:
    """Return q such that sum q_k g_k is the gradient of P = -cos(1, F).

    With F normalised to f = F / |F| and p = 1 / |1|: q = ((f . p) f - p) / |F|. Returns None if
    the losses are equal or zero.
    """
    small, exponent = scaled_down(losses)
    size = float(np.linalg.norm(small))
    if size == 0.0:
        return None
    direction, p = small / size, np.full(len(losses), len(losses) ** -0.5)
    h = (direction @ p) * direction - p
    return np.ldexp(h / size, -exponent) if np.linalg.norm(h) > EQUAL else None


@dataclass(frozen=True)
class Block:
    """Layers `first` to `last` - 1, solved together."""

    first: int
    last: int
    gram: Vector  # the sum of the layers' Gram matrices
    coefficients: Vector | None  # None: the direction vanishes


def solve_layers(
    gram: Vector, clients: int, q: Vector | None, normalize: Normalize, tolerance: float
) -> list[Block] | None:
    """Return blocks of layers in none of which the direction vanishes.

    A layer whose direction vanishes is merged with its neighbour until none is left. Returns None
    if the direction vanishes in all layers together.
    """

    def solve(first: int, last: int, gram: Vector) -> Block:
        return Block(first, last, gram, layer_direction(gram, clients, q, normalize, tolerance))

    blocks = [solve(0, 1, gram[0])]
    if blocks[0].coefficients is None and every_block_vanishes(
        gram, clients, q, normalize, tolerance
    ):
        return None
    blocks += [solve(layer, layer + 1, gram[layer]) for layer in range(1, len(gram))]
    while vanishing := [k for k, block in enumerate(blocks) if block.coefficients is None]:
        if len(blocks) == 1:
            return None
        k = min(vanishing[0], len(blocks) - 2)
        lower, upper = blocks[k : k + 2]
        blocks[k : k + 2] = [solve(lower.first, upper.last, lower.gram + upper.gram)]
    return blocks


def every_block_vanishes(
    gram: Vector, clients: int, q: Vector | None, normalize: Normalize, tolerance: float
) -> bool:
    """Return whether one combination of the rows vanishes in every layer.

    Then no merging of layers finds a direction: its weights, each divided by the length of its
    row in a block, are feasible there, so the block's shortest combination is no longer. A result
    of False proves nothing. The argument holds only for rows of one length in each block and for
    the same grad P in all blocks; otherwise the result is False.
    """
    if len(gram) == 1 or normalize == "none" or (normalize == "rows_then_p" and q is not None):
        return False
    total = gram.sum(axis=0)
    members = layer_members(total, clients, q, normalize)
    if not len(members):
        return False
    weights = min_norm_on_simplex(members.products(total)).weights
    return all(members.vanish(weights, layer, tolerance / 2.0) for layer in gram)


def layer_direction(
    gram: Vector, clients: int, q: Vector | None, normalize: Normalize, tolerance: float
) -> Vector | None:
    """Return the coefficients of the shortest convex combination of a layer's members.

    Members are the rows of clients and absent clients, and grad P. Returns None if the
    combination vanishes.
    """
    members = layer_members(gram, clients, q, normalize)
    if not len(members):
        return None
    products = members.products(gram)
    weights = min_norm_on_simplex(products).weights
    return None if vanishes(weights, products, tolerance) else np.asarray(weights @ members.lines)


@dataclass(frozen=True)
class Members:
    """The vectors of a layer's problem: rows, each times a factor, then perhaps grad P.

    Multiplying them as full lines of coefficients takes time cubic in the number of rows. That is
    done only for few rows, where it is as fast and gives the bits that earlier versions gave.
    """

    rows: Indices  # the indices of the rows that are not zero
    factors: Vector  # one per index
    fair: Vector | None  # grad P as coefficients of the clients' rows, which come first
    size: int  # the number of rows of the layer

    def __len__(self) -> int:
        return len(self.rows) + (self.fair is not None)

    @property
    def lines(self) -> Vector:
        """Each member as coefficients of the layer's rows, of shape (members, rows)."""
        out = np.zeros((len(self), self.size))
        out[np.arange(len(self.rows)), self.rows] = self.factors
        if self.fair is not None:
            out[-1, : len(self.fair)] = self.fair
        return out

    def scaled(self, mu: float, gram: Vector) -> Members:
        """Return the same members, each scaled to length mu."""
        if self.size < MANY_ROWS:
            sizes = lengths(self.lines, gram)
        else:
            sizes = self.factors * np.sqrt(np.diagonal(gram))[self.rows]
            if self.fair is not None:
                sizes = np.append(sizes, length(self.fair, clients_part(gram, self.fair)))
        fair = None if self.fair is None else self.fair * mu / sizes[-1]
        return replace(self, factors=self.factors * mu / sizes[: len(self.rows)], fair=fair)

    def products(self, gram: Vector) -> Vector:
        """Return the inner products of the members, of shape (members, members)."""
        if self.size < MANY_ROWS:
            return np.asarray((lines := self.lines) @ gram @ lines.T)
        count, out = len(self.rows), np.empty((len(self), len(self)))
        rows = gram if count == self.size else gram[np.ix_(self.rows, self.rows)]
        np.multiply(rows, self.factors[:, None], out=out[:count, :count])
        out[:count, :count] *= self.factors
        if self.fair is not None:
            slopes = self.fair @ gram[: len(self.fair)]
            out[count, :count] = out[:count, count] = slopes[self.rows] * self.factors
            out[count, count] = slopes[: len(self.fair)] @ self.fair
        return out

    def vanish(self, weights: Vector, gram: Vector, tolerance: float) -> bool:
        """Return whether the weighted members vanish in another layer, given its products."""
        rows = np.zeros(self.size)
        rows[self.rows] = weights[: len(self.rows)] * self.factors
        terms = reach(rows, gram)
        if self.fair is not None and weights[-1] > 0.0:
            own = clients_part(gram, self.fair)
            if not vanishes(self.fair, own):
                rows[: len(own)] += weights[-1] * self.fair
                terms += float(weights[-1]) * length(self.fair, own)
        return terms > ZERO and length(rows, gram) <= tolerance * terms


def layer_members(gram: Vector, clients: int, q: Vector | None, normalize: Normalize) -> Members:
    """Return the vectors of a layer's problem, scaled to the clients' mean norm if required."""
    norms = np.sqrt(np.diagonal(gram))
    mu = float(norms[:clients].mean())
    rows, fair = np.flatnonzero(norms > ZERO), None
    if q is not None:
        fair = q if normalize == "none" else scaled_down(q)[0]  # its length is set below
        if normalize == "rows_then_p":
            own = norms[:clients]
            fair = np.divide(fair * mu, own, out=np.zeros(clients), where=own > ZERO)
        if vanishes(fair, clients_part(gram, fair)):
            fair = None
    members = Members(rows, np.ones(len(rows)), fair, len(gram))
    return members if normalize == "none" else members.scaled(mu, gram)


def clients_part(gram: Vector, fair: Vector) -> Vector:
    """Return the products of the clients' rows, which are the first len(fair) rows."""
    return gram[: len(fair), : len(fair)]


def rescaled_to_mean(
    per_layer: Vector, cohort: Cohort, status: str, notes: dict[str, object]
) -> Step:
    """Return the step with these coefficients per layer, as long as the clients' mean update."""
    mean, gram = uniform(len(cohort), len(cohort.gram)), cohort.gram.whole
    if vanishes(mean, gram):
        return Step(np.zeros_like(per_layer), status="zero_mean", notes=notes)
    square = sum(
        length(line, layer) ** 2 for line, layer in zip(per_layer, cohort.gram.layers, strict=True)
    )
    return Step(per_layer * length(mean, gram) / square**0.5, status, notes=notes)
