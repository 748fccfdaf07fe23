"""Checkpoints of long runs, so that a killed run continues where it was.

A checkpoint is one npz file of arrays, without pickles. Selection, batches and faults are
functions of seed and round, so no random state is saved: a resumed run ends with the same bits.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np

from fairfleet.common.atomic_files import Sync, write_atomically
from fairfleet.common.tensors import Model, Signature
from fairfleet.lab.simulation.simulation import Simulation
from fairfleet.server.aggregation.admission import LossHistory
from fairfleet.server.aggregation.participation import ParticipationBook
from fairfleet.server.aggregation.results import ServerState
from fairfleet.server.aggregation.stored_state import dump_state
from fairfleet.server.rounds.attendance import AttendanceBook
from fairfleet.server.rules import PastRow
from fairfleet.server.rules.optimizer_vectors import OptimizerState

# What a damaged file, or one of another version, may raise when it is read.
UNREADABLE = (
    OSError,
    EOFError,
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    RuntimeError,
    BadZipFile,
)


def save(path: Path, simulation: Simulation, notes: Mapping[str, str]) -> None:
    """Save a simulation. Call this only between two rounds.

    `notes` are texts of the caller, which `restore` returns.
    """
    facts, arrays = _facts(simulation, notes), _arrays(simulation)
    path.parent.mkdir(parents=True, exist_ok=True)

    def write(temp_path: Path) -> None:
        with temp_path.open("wb") as file:
            np.savez(file, facts=np.array(json.dumps(facts)), **arrays)

    # A damaged checkpoint is ignored when it is read, so it needs no fsync.
    write_atomically(path, write, sync=Sync.NOTHING)


def _facts(simulation: Simulation, notes: Mapping[str, str]) -> dict[str, Any]:
    """Return everything that is not an array, as JSON values."""
    server, _ = dump_state(simulation.state)
    past = simulation.history.rows() if simulation.history else {}
    return {
        "done": simulation.done,
        "server": json.loads(server),
        "has_optimizer": simulation.state.optimizer is not None,
        "first_losses": simulation.participation.first_losses,
        "participations": simulation.participation.participations,
        "averaged": simulation.average.count,
        "last_reports": simulation.last_reports,
        "attendance": simulation.attendance.dump(),
        "watched": simulation.loss_history.dump(),
        "past": [asdict(row) for row in past.values()],
        "books": dict(notes),
        "personal": list(simulation.personal.models if simulation.personal else ()),
    }


def _arrays(simulation: Simulation) -> dict[str, Any]:
    _, vectors = dump_state(simulation.state)
    arrays: dict[str, Any] = {f"optimizer.{name}": vector for name, vector in vectors.items()}
    if simulation.history:
        arrays |= {
            f"past.{client}": simulation.history.row(client) for client in simulation.history.rows()
        }
    arrays |= {f"carried.{client}": vector for client, vector in simulation.coder.memory.items()}
    if simulation.average.total is not None:
        arrays["average"] = simulation.average.total
    arrays |= _model_arrays("", simulation.model)
    personal = simulation.personal.models if simulation.personal else {}
    for client, model in personal.items():
        arrays |= _model_arrays(f"personal.{client}.", model)
    return arrays


def restore(path: Path, simulation: Simulation) -> dict[str, str] | None:
    """Continue from a checkpoint, and return the notes that were saved with it.

    Return None, and leave the simulation as it is, if there is no readable checkpoint.
    """
    try:
        saved = _read(path, simulation)
    except UNREADABLE:
        return None
    simulation.done, simulation.model, simulation.state = saved.done, saved.model, saved.state
    simulation.participation = ParticipationBook(
        saved.first_losses, saved.participations, initial=simulation.participation.initial
    )
    simulation.last_reports, simulation.loss_history = saved.last_reports, saved.loss_history
    simulation.attendance = saved.attendance
    simulation.average.count, simulation.average.total = saved.averaged, saved.average
    simulation.coder.memory = saved.coder_memory
    if simulation.history is not None:
        for past, row in saved.past:
            simulation.history.put(
                past.client, past.round, row, loss=past.loss, samples=past.samples
            )
    if simulation.personal:
        simulation.personal.models.update(saved.personal)
    return saved.notes


@dataclass(frozen=True)
class _Checkpoint:
    """The content of a checkpoint.

    It is read completely before any of it is used, so nothing of a damaged file is used.
    """

    done: int
    model: Model
    state: ServerState
    first_losses: dict[str, float]
    participations: dict[str, int]
    last_reports: dict[str, tuple[int, float]]
    attendance: AttendanceBook
    loss_history: LossHistory
    averaged: int
    average: Any
    coder_memory: dict[str, Any]
    past: list[tuple[PastRow, Any]]
    personal: dict[int, Model]  # by client number
    notes: dict[str, str]


def _read(path: Path, simulation: Simulation) -> _Checkpoint:
    with np.load(path, allow_pickle=False) as file:
        facts = json.loads(str(file["facts"]))
        arrays = {name: file[name] for name in file.files if name != "facts"}
    rows, signature = _with_prefix(arrays, "past."), simulation.model.signature
    return _Checkpoint(
        done=facts["done"],
        model=_model(signature, arrays, ""),
        state=_server_state(simulation, facts, arrays),
        first_losses=facts["first_losses"],
        participations=facts["participations"],
        last_reports={
            client: (number, loss) for client, (number, loss) in facts["last_reports"].items()
        },
        # A checkpoint of an older version has no attendance. Each client's last selection is then
        # the last round that it delivered in (`last_reports`), and it has missed none.
        attendance=AttendanceBook.load(facts.get("attendance", {})),
        loss_history=LossHistory.load(facts["watched"]),
        averaged=facts["averaged"],
        average=arrays.get("average"),
        coder_memory=_with_prefix(arrays, "carried."),
        past=[(PastRow(**past), rows[past["client"]]) for past in facts["past"]],
        personal={
            client: _model(signature, arrays, f"personal.{client}.") for client in facts["personal"]
        },
        notes=facts["books"],
    )


def _server_state(
    simulation: Simulation, facts: dict[str, Any], arrays: dict[str, Any]
) -> ServerState:
    memory = facts["server"]["rule"]
    rule = None
    if memory is not None:
        rule = simulation.federation.recipe.rule.Memory.model_validate(memory)
    optimizer = OptimizerState(_with_prefix(arrays, "optimizer."), facts["server"]["optimizer"])
    return ServerState(rule, optimizer if facts["has_optimizer"] else None)


def _model_arrays(prefix: str, model: Model) -> dict[str, Any]:
    parts = {"parameters": model.parameters, "buffers": model.buffers, "counters": model.counters}
    return {f"{prefix}{name}": part for name, part in parts.items()}


def _model(signature: Signature, arrays: Mapping[str, Any], prefix: str) -> Model:
    model = Model.empty(signature)
    for name, part in _model_arrays(prefix, model).items():
        part[:] = arrays[name]
    return model


def _with_prefix(arrays: dict[str, Any], prefix: str) -> dict[str, Any]:
    return {
        name.removeprefix(prefix): array
        for name, array in arrays.items()
        if name.startswith(prefix)
    }
