"""A long run on the disk, so that one that is killed goes on where it was: arrays in one npz file, no pickle.

Who is asked, which batches are drawn and what goes wrong are functions of seed and round, so nothing random needs to
be kept: a run that was taken up again ends with the same bits.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np

from fairfleet.common.tensors import Model, Signature
from fairfleet.lab.simulation import Simulation
from fairfleet.server.admission import Watched
from fairfleet.server.aggregation import ServerState
from fairfleet.server.committing import dump_state
from fairfleet.server.optimizers import OptimizerState
from fairfleet.server.rules.base import PastRow

# What a damaged file, or one of another version, may raise when it is read.
UNREADABLE = (OSError, EOFError, ValueError, TypeError, LookupError, AttributeError, RuntimeError, BadZipFile)


def save(path: Path, simulation: Simulation, books: Mapping[str, str]) -> None:
    """Between two rounds. `books` are kept beside it, for whoever keeps them."""
    server, vectors = dump_state(simulation.state)
    past = simulation.history.rows() if simulation.history else {}
    facts = {
        "done": simulation.done,
        "server": json.loads(server),
        "has_optimizer": simulation.state.optimizer is not None,
        "first_losses": simulation.first_losses,
        "participations": simulation.participations,
        "averaged": simulation.average.count,
        "last_reports": simulation.last_reports,
        "watched": simulation.watched.dump(),
        "past": [asdict(row) for row in past.values()],
        "books": dict(books),
    }
    arrays: dict[str, Any] = {f"optimizer.{name}": vector for name, vector in vectors.items()}
    arrays |= {f"past.{client}": simulation.history.row(client) for client in past if simulation.history}
    arrays |= {f"carried.{client}": values for client, values in simulation.coding.carried.items()}
    if simulation.average.total is not None:
        arrays["average"] = simulation.average.total
    arrays |= _model_arrays("", simulation.model)
    own = simulation.personal.models if simulation.personal else {}
    facts["personal"] = list(own)
    for client, model in own.items():
        arrays |= _model_arrays(f"personal.{client}.", model)
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(".new")
    with beside.open("wb") as file:
        np.savez(file, facts=np.array(json.dumps(facts)), **arrays)
    os.replace(beside, path)  # there whole or not at all


def restore(path: Path, simulation: Simulation) -> dict[str, str] | None:
    """Takes the simulation to where it was; returns the books, or None where there is nothing to go on with."""
    try:
        found = _read(path, simulation)
    except UNREADABLE:
        return None
    simulation.done, simulation.model, simulation.state = found.done, found.model, found.state
    simulation.first_losses, simulation.participations = found.first_losses, found.participations
    simulation.last_reports, simulation.watched = found.last_reports, found.watched
    simulation.average.count, simulation.average.total = found.averaged, found.average
    simulation.coding.carried = found.carried
    if simulation.history is not None:
        for past, row in found.past:
            simulation.history.put(past.client, past.round, row, loss=past.loss, samples=past.samples)
    if simulation.personal:
        simulation.personal.models.update(found.personal)
    return found.books


@dataclass(frozen=True)
class _Found:
    """What a checkpoint holds. It is read whole before any of it counts: nothing of a damaged one is used."""

    done: int
    model: Model
    state: ServerState
    first_losses: dict[str, float]
    participations: dict[str, int]
    last_reports: dict[str, tuple[int, float]]
    watched: Watched
    averaged: int
    average: Any
    carried: dict[str, Any]
    past: list[tuple[PastRow, Any]]
    personal: dict[int, Model]  # by the client's number
    books: dict[str, str]


def _read(path: Path, simulation: Simulation) -> _Found:
    with np.load(path, allow_pickle=False) as file:
        facts, arrays = json.loads(str(file["facts"])), {name: file[name] for name in file.files if name != "facts"}
    memory = facts["server"]["rule"]
    rule = simulation.federation.recipe.rule.Memory.model_validate(memory) if memory is not None else None
    optimizer = OptimizerState(_with_prefix(arrays, "optimizer."), facts["server"]["optimizer"])
    rows, signature = _with_prefix(arrays, "past."), simulation.model.signature
    return _Found(
        done=facts["done"],
        model=_model(signature, arrays, ""),
        state=ServerState(rule, optimizer if facts["has_optimizer"] else None),
        first_losses=facts["first_losses"],
        participations=facts["participations"],
        last_reports={client: (number, loss) for client, (number, loss) in facts["last_reports"].items()},
        watched=Watched.load(facts["watched"]),
        averaged=facts["averaged"],
        average=arrays.get("average"),
        carried=_with_prefix(arrays, "carried."),
        past=[(PastRow(**past), rows[past["client"]]) for past in facts["past"]],
        personal={client: _model(signature, arrays, f"personal.{client}.") for client in facts["personal"]},
        books=facts["books"],
    )


def _model_arrays(prefix: str, model: Model) -> dict[str, Any]:
    parts = {"parameters": model.parameters, "buffers": model.buffers, "counters": model.counters}
    return {f"{prefix}{name}": part for name, part in parts.items()}


def _model(signature: Signature, arrays: Mapping[str, Any], prefix: str) -> Model:
    model = Model.empty(signature)
    for name, part in _model_arrays(prefix, model).items():
        part[:] = arrays[name]
    return model


def _with_prefix(arrays: dict[str, Any], prefix: str) -> dict[str, Any]:
    return {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}
