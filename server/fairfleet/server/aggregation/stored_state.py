"""Reads and writes a committed model and the state of rule and optimizer that belongs to it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fairfleet.common.errors import FleetError, StateDirError
from fairfleet.common.tensors import Model
from fairfleet.server.aggregation.results import ServerState
from fairfleet.server.rules import Recipe
from fairfleet.server.rules.optimizer_vectors import OptimizerState


def read_model(path: Path) -> Model:
    """Read a model of the state directory; raise StateDirError if the file is damaged."""
    try:
        return Model.load(path)[0]
    except (FleetError, ValueError) as error:
        raise StateDirError(
            f"{path} is damaged: {error}. Restore the state directory from a backup."
        ) from error


def state_numbers(state: ServerState) -> dict[str, Any]:
    """Return the state of rule and optimizer without vectors, as plain Python values."""
    rule = state.rule.model_dump(mode="python") if state.rule else None
    return {"rule": rule, "optimizer": state.optimizer.numbers if state.optimizer else {}}


def dump_state(state: ServerState) -> tuple[str, Mapping[str, Any]]:
    """Return the state as JSON, and the optimizer's vectors."""
    optimizer = state.optimizer or OptimizerState()
    rule = state.rule.model_dump(mode="json") if state.rule else None
    return json.dumps({"rule": rule, "optimizer": optimizer.numbers}), optimizer.vectors


def load_state(rule_state: str | None, recipe: Recipe, vectors: dict[str, Any]) -> ServerState:
    """Return the state that was committed with a model.

    A rule or an optimizer whose state has another form, because the settings were changed since,
    starts without any.
    """
    if rule_state is None:
        return ServerState()
    values = json.loads(rule_state)
    try:
        memory = values["rule"]
        rule = None if memory is None else recipe.rule.Memory.model_validate(memory)
    except ValueError:
        rule = None
    optimizer = OptimizerState(vectors, values["optimizer"])
    return ServerState(rule, optimizer if _has_form_of(optimizer, recipe) else None)


def _has_form_of(optimizer: OptimizerState, recipe: Recipe) -> bool:
    expected = recipe.optimizer.initial(0)
    return (
        optimizer.vectors.keys() == expected.vectors.keys()
        and optimizer.numbers.keys() == expected.numbers.keys()
    )
