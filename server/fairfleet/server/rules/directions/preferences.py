"""Preference constraints on the losses, for FedMGDA.

Lin, Zhen, Li, Zhang, Kwong: Pareto Multi-Task Learning, NeurIPS 2019, cited by FedMGDA+ as a way
to choose among Pareto-stationary models. Preference vectors u_1, ..., u_K of length one divide the
space of losses: the model should be where the losses F point most along the chosen vector u_c,
that is G_j = (u_j - u_c) . F <= 0 for all j. Each G_j is a combination of losses, so its gradient
is the same combination of updates, and one more row of the Gram matrix.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, NamedTuple

import numpy as np
from pydantic import BeforeValidator

from fairfleet.server.rules.cohort import Indices, Vector
from fairfleet.server.rules.solvers.algebra import length, lengths, scaled_down, vanishes
from fairfleet.server.rules.solvers.min_norm import min_norm_on_simplex

OTHERS = "*"  # stands for every client without a weight of its own
FORM = (
    "expected vectors separated by '|', each with client:weight pairs separated by ';', for "
    "example 'ann:2;*:1|ann:1;*:2', where * means all other clients"
)


def parse_preferences(given: Any) -> Any:
    """Return the vectors of a text such as `ann:2;*:1|ann:1;*:2`; pass other values through."""
    if not isinstance(given, str):
        return given
    vectors: list[dict[str, str]] = []
    for text in filter(None, given.split("|")):
        pairs = [pair.rpartition(":") for pair in text.split(";")]
        if not all(client and colon for client, colon, _ in pairs):
            raise ValueError(f"{text!r} is not a preference vector; {FORM}")
        vectors.append({client: weight for client, _, weight in pairs})
    return tuple(vectors)


Preferences = Annotated[tuple[dict[str, float], ...], BeforeValidator(parse_preferences)]


def check_preferences(preferences: Preferences, chosen: int, epsilon: float) -> None:
    """Raise ValueError for preferences that divide nothing or cannot be combined with epsilon."""
    if not preferences:
        return
    if len(preferences) < 2 or chosen >= len(preferences):
        raise ValueError(
            f"found {len(preferences)} preference vectors and chosen={chosen}; expected at least "
            f"two vectors and the index of one of them, from 0; {FORM}"
        )
    if any(not 0.0 <= weight < np.inf for vector in preferences for weight in vector.values()):
        raise ValueError("a preference is negative or not finite; expected weights of 0 or above")
    if any(not any(vector.values()) for vector in preferences):
        raise ValueError("a preference vector has no weight above 0; expected at least one")
    if epsilon < 1.0:
        raise ValueError(
            f"found preferences and epsilon={epsilon:g}; weights near lam0 keep no constraint. "
            "Leave out one of them"
        )


class Constraints(NamedTuple):
    """The active constraints: gradients as combinations of the objectives' rows."""

    lines: Vector  # (constraints, objectives)
    violated: Vector  # one bool per constraint: G_j > 0
    indices: list[int]  # of the preference vectors behind the constraints


def active_constraints(
    losses: Vector,
    names: Sequence[str],
    preferences: Sequence[Mapping[str, float]],
    chosen: int,
    margin: float,
) -> Constraints:
    """Return the constraints G_j = (u_j - u_c) . F that are above -margin |F|.

    Vectors are restricted to the named clients. One without weight there gives no constraint; if
    it is the chosen one, there are none.
    """
    raw = np.array(
        [[vector.get(name, vector.get(OTHERS, 0.0)) for name in names] for vector in preferences]
    )
    raw = raw / np.maximum(raw.max(axis=1, keepdims=True), np.finfo(float).tiny)
    sizes = np.linalg.norm(raw, axis=1)
    if sizes[chosen] == 0.0:
        return Constraints(np.zeros((0, len(names))), np.zeros(0, bool), [])
    usable = [index for index in np.flatnonzero(sizes).tolist() if index != chosen]
    units = raw / np.maximum(sizes, np.finfo(float).tiny)[:, None]
    lines = units[usable] - units[chosen]
    small, _ = scaled_down(losses)
    values = lines @ small
    bound = -margin * float(np.linalg.norm(small))
    kept = np.flatnonzero((values >= bound) & (np.abs(lines).max(axis=1, initial=0.0) > 0.0))
    return Constraints(lines[kept], values[kept] > 0.0, [usable[index] for index in kept])


class PreferredCombination(NamedTuple):
    """A direction as coefficients of the objectives' rows."""

    coefficients: Vector
    lam: Vector  # the weights of the objectives, then of the active constraints
    active: list[int]
    status: str


def preferred_combination(
    gram: Vector, moved: Indices, constraints: Constraints, normalised: bool
) -> PreferredCombination:
    """Return the shortest convex combination of the updates and the constraints' gradients.

    No loss and no active constraint rises along it. Where it vanishes although a constraint is
    violated, the violated constraints alone are lowered first, as the paper does at its start;
    then losses may rise.
    """
    own = np.eye(len(gram))[moved]
    is_zero = [vanishes(line, gram) for line in constraints.lines]
    kept = [index for index, zero in enumerate(is_zero) if not zero]
    active = [constraints.indices[index] for index in kept]
    lines = np.vstack([own, constraints.lines[kept]])
    if normalised:
        lines = lines / lengths(lines, gram)[:, None]
    weights = _shortest(lines, gram)
    lam = np.zeros(len(gram) + len(kept))
    if weights is not None:
        lam[[*moved, *range(len(gram), len(lam))]] = weights
        return PreferredCombination(weights @ lines, lam, active, "ok")
    urgent = [place for place, index in enumerate(kept) if constraints.violated[index]]
    weights = _shortest(lines[len(own) :][urgent], gram) if urgent else None
    if weights is None:
        return PreferredCombination(np.zeros(len(gram)), lam, active, "pareto_stationary")
    lam[[len(gram) + place for place in urgent]] = weights
    direction = weights @ lines[len(own) :][urgent]
    return PreferredCombination(direction, lam, active, "constraints_only")


def _shortest(lines: Vector, gram: Vector) -> Vector | None:
    """Return the weights of the shortest convex combination of lines; None if it vanishes."""
    products = lines @ gram @ lines.T
    weights = min_norm_on_simplex(products).weights
    coefficients = weights @ lines
    noise = vanishes(weights, products) or length(coefficients, gram) == 0.0
    return None if noise else weights
