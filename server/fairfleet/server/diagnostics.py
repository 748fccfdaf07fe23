"""What a step means for each client, from inner products and coefficients alone.

It costs nothing beside the step and is known before the model moves.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from fairfleet.server.conflict_map import CONFLICT, ConflictMap
from fairfleet.server.gram import Gram
from fairfleet.server.rules.base import Cohort, Step, Vector


class Diagnostics(BaseModel):
    """One round's record of its step. Layered rules have a coefficient per layer."""

    model_config = ConfigDict(frozen=True, arbitrary_types_allowed=True)
    rule: str
    status: str  # "ok", or the fallback that was taken
    coefficients: dict[str, float | list[float]]
    history_coefficients: dict[str, float | list[float]]
    direction_norm: float | None  # None for column rules: their direction is no combination of rows
    predicted_decrease: dict[str, float]  # g_k . d: to first order, what a unit step takes off each loss
    cosines: dict[str, float]  # between each update and the direction
    conflicts: list[str]  # clients that the direction would harm
    layer_conflicts: list[list[str]]  # the same inside each layer
    client_cosines: list[list[float]]  # between the updates, in the order of the ids
    notes: dict[str, Any]
    conflict_map: ConflictMap | None = Field(default=None, exclude=True, repr=False)  # None: of too many clients


def diagnose(rule: str, cohort: Cohort, step: Step) -> Diagnostics:
    gram, clients = cohort.gram, list(cohort.clients)
    per_layer = expand(step.coefficients, gram)
    products = np.einsum("lij,lj->li", gram.layers, per_layer)  # g_i . d inside each layer
    lengths = np.sqrt(np.maximum((products * per_layer).sum(axis=1), 0.0))
    norms = np.sqrt(np.diagonal(gram.layers, axis1=1, axis2=2))
    inside = cosine(products, norms * lengths[:, None])[:, : len(clients)]
    length = float(np.sqrt((lengths**2).sum()))
    whole = cosine(products.sum(axis=0), gram.norms * length)[: len(clients)]
    linear = step.columns is None
    return Diagnostics(
        rule=rule,
        status=step.status,
        coefficients=named(clients, step.coefficients) if linear else {},
        history_coefficients=named([past.client for past in cohort.history], step.coefficients, len(clients)),
        direction_norm=length if linear else None,
        predicted_decrease=named(clients, products.sum(axis=0)) if linear else {},
        cosines=named(clients, whole) if linear else {},
        conflicts=names(clients, whole < CONFLICT),
        layer_conflicts=[names(clients, line < CONFLICT) for line in inside],
        client_cosines=_between(gram, len(clients)),
        notes={key: value.tolist() if isinstance(value, np.ndarray) else value for key, value in step.notes.items()},
        conflict_map=ConflictMap.of(cohort.round, clients, gram.layers, inside, whole),
    )


def _between(gram: Gram, clients: int) -> list[list[float]]:
    """To four digits: there are many of them, every round's record has them, and nobody computes with them."""
    found = cosine(gram.whole, np.outer(gram.norms, gram.norms))[:clients, :clients].round(4)
    cosines: list[list[float]] = found.tolist()
    return cosines


def expand(coefficients: Vector, gram: Gram) -> Vector:
    """One coefficient per layer and row, whatever the rule gave."""
    full = np.zeros((len(gram.layers), len(gram)))
    full[:, : coefficients.shape[-1]] = coefficients
    return full


def cosine(products: Vector, lengths: Vector) -> Vector:
    return np.divide(products, lengths, out=np.zeros_like(products), where=lengths > 0.0)


def named(clients: list[str], values: Vector, start: int = 0) -> dict[str, Any]:
    columns = values[..., start : start + len(clients)].T
    return dict(zip(clients, columns.tolist(), strict=False))


def names(clients: list[str], chosen: NDArray[np.bool_]) -> list[str]:
    return [client for client, here in zip(clients, chosen, strict=True) if here]
