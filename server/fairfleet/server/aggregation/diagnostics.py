"""Computes what a step means for each client, from inner products and coefficients alone.

The figures cost little compared with the step and are known before the model changes. The level
says how many of them are computed. It depends on the size of the round and on the settings, never
on the rule. A figure that was not computed is absent. No figure influences the step.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from fairfleet.server.aggregation.conflict_map import (
    CONFLICT,
    MAX_CLIENTS,
    MAX_PRODUCTS,
    ConflictMap,
)
from fairfleet.server.gram import Detail, Gram
from fairfleet.server.gram.blocks import Row, length
from fairfleet.server.rules import Cohort, Step, Vector

Level = Literal["full", "model", "off"]
DiagnosticsSetting = Annotated[
    Literal["auto", "full", "model", "off"],
    # YAML reads an unquoted off as false.
    BeforeValidator(lambda value: "off" if value is False else value),
]

DETAILS: dict[Level, Detail] = {"full": Detail.LAYERS, "model": Detail.WHOLE, "off": Detail.NORMS}
# Fields that a record omits if they were not computed.
OPTIONAL = ("conflicts", "layer_conflicts", "client_cosines")


def level_for(setting: DiagnosticsSetting, clients: int, blocks: int) -> Level:
    """Return the level of a round with this many clients and blocks of the model.

    >>> [level_for("auto", clients, 62) for clients in (100, 254, 255, 2000, 2001)]
    ['full', 'full', 'model', 'model', 'off']
    """
    if setting != "auto":
        return setting
    if clients**2 * blocks <= MAX_PRODUCTS:
        return "full"
    return "model" if clients**2 <= MAX_PRODUCTS else "off"


class Diagnostics(BaseModel):
    """The record of one round's step. Layered rules have one coefficient per layer."""

    model_config = ConfigDict(frozen=True, arbitrary_types_allowed=True)
    rule: str
    status: str  # "ok", or the fallback that was taken
    level: Level | None = None  # of the computed figures; None: there was no step
    coefficients: dict[str, float | list[float]]  # below the full level: means over the layers
    history_coefficients: dict[str, float | list[float]]
    # None for column rules: their direction is not a combination of rows.
    direction_norm: float | None
    # g_k . d: the decrease of each loss by a unit step, to first order.
    predicted_decrease: dict[str, float]
    cosines: dict[str, float]  # between each update and the direction
    conflicts: list[str] | None  # clients that the direction would harm; None: not computed
    layer_conflicts: list[list[str]] | None  # the same inside each layer
    # Between the updates, in the order of the ids; None if there are too many clients.
    client_cosines: list[list[float]] | None
    notes: dict[str, Any]
    # None if there are too many clients.
    conflict_map: ConflictMap | None = Field(default=None, exclude=True, repr=False)

    @classmethod
    def empty(cls, rule: str, status: str) -> Diagnostics:
        """Return the record of a round without a step."""
        return cls(
            rule=rule,
            status=status,
            coefficients={},
            history_coefficients={},
            direction_norm=None,
            predicted_decrease={},
            cosines={},
            conflicts=[],
            layer_conflicts=[],
            client_cosines=[],
            notes={},
        )

    def record(self) -> dict[str, Any]:
        """Return plain values for JSON, without the figures that were not computed."""
        fields = self.model_dump(mode="json")
        return {
            key: value for key, value in fields.items() if value is not None or key not in OPTIONAL
        }


class DirectionProjection(NamedTuple):
    """The projections of the direction onto the updates of the clients."""

    length: float
    decreases: Vector  # g_k . d
    cosines: Vector
    layer_cosines: Vector | None  # (layers, clients); None: not computed


def diagnose(
    rule: str, cohort: Cohort, step: Step, level: Level, gram: Gram | None, direction: Row
) -> Diagnostics:
    """Return the record of a step.

    `gram` has the inner products of the cohort's rows that the level needs, or is None if it
    needs none.
    """
    clients, linear = list(cohort.clients), step.columns is None
    per_layer = level == "full"
    along = along_direction(step.coefficients, gram, len(clients), per_layer) if gram else None
    if along is None:
        level = "off"
    norm = along.length if along else length(direction)
    layers = along.layer_cosines if along else None
    weights = step.coefficients if per_layer else np.atleast_2d(step.coefficients).mean(axis=0)
    return Diagnostics(
        rule=rule,
        status=step.status,
        level=level,
        coefficients=named(clients, weights) if linear else {},
        history_coefficients=named([past.client for past in cohort.history], weights, len(clients)),
        direction_norm=norm if linear else None,
        predicted_decrease=named(clients, along.decreases) if along and linear else {},
        cosines=named(clients, along.cosines) if along and linear else {},
        conflicts=names(clients, along.cosines < CONFLICT) if along else None,
        layer_conflicts=None
        if layers is None
        else [names(clients, line < CONFLICT) for line in layers],
        client_cosines=between(gram, len(clients))
        if along and gram and len(clients) <= MAX_CLIENTS
        else None,
        notes={
            key: value.tolist() if isinstance(value, np.ndarray) else value
            for key, value in step.notes.items()
        },
        conflict_map=(
            ConflictMap.of(cohort.round, clients, gram.layers, layers, along.cosines)
            if along and gram and layers is not None
            else None
        ),
    )


def along_direction(
    coefficients: Vector, gram: Gram, clients: int, per_layer: bool
) -> DirectionProjection | None:
    """Return the projections of the direction onto the first rows, which are the clients'.

    Returns None if the products do not suffice.
    """
    if gram.detail is not Detail.LAYERS:
        if coefficients.ndim == 2:
            return None
        return project_on_whole_updates(expand(coefficients, 1, len(gram))[0], gram, clients)
    weights = expand(coefficients, len(gram.layers), len(gram))
    products = np.einsum("lij,lj->li", gram.layers, weights)  # g_i . d inside each layer
    lengths = np.sqrt(np.maximum((products * weights).sum(axis=1), 0.0))
    total, norm = products.sum(axis=0), float(np.sqrt((lengths**2).sum()))
    norms = np.sqrt(np.diagonal(gram.layers, axis1=1, axis2=2))
    cosines = cosine(total, np.sqrt((norms**2).sum(axis=0)) * norm)
    per_layer_cosines = cosine(products, norms * lengths[:, None])[:, :clients]
    return DirectionProjection(
        norm, total[:clients], cosines[:clients], per_layer_cosines if per_layer else None
    )


def project_on_whole_updates(coefficients: Vector, gram: Gram, clients: int) -> DirectionProjection:
    """Return the projections of the direction onto the clients' rows, without those per layer."""
    products = gram.whole @ coefficients
    norm = float(np.sqrt(max(float(products @ coefficients), 0.0)))
    return DirectionProjection(
        norm, products[:clients], cosine(products, gram.norms * norm)[:clients], None
    )


def between(gram: Gram, clients: int) -> list[list[float]]:
    """Return the cosines between the clients' updates, rounded to four digits.

    Rounding keeps the record of a round small; nothing is computed from these values.
    """
    own = gram.of(slice(0, clients))
    cosines: list[list[float]] = cosine(own.whole, np.outer(own.norms, own.norms)).round(4).tolist()
    return cosines


def expand(coefficients: Vector, layers: int, rows: int) -> Vector:
    """Return one coefficient per layer and row; rows without one get 0."""
    full = np.zeros((layers, rows))
    full[:, : coefficients.shape[-1]] = coefficients
    return full


def cosine(products: Vector, lengths: Vector) -> Vector:
    """Return products / lengths, and 0 where a length is 0."""
    return np.divide(products, lengths, out=np.zeros_like(products), where=lengths > 0.0)


def named(clients: list[str], values: Vector, start: int = 0) -> dict[str, Any]:
    """Return by client the columns of the values that begin at `start`."""
    columns = values[..., start : start + len(clients)].T
    return dict(zip(clients, columns.tolist(), strict=False))


def names(clients: list[str], chosen: NDArray[np.bool_]) -> list[str]:
    """Return the clients that the mask chooses."""
    return [client for client, is_chosen in zip(clients, chosen, strict=True) if is_chosen]
