"""`fairfleet server --check`: is a state directory whole, and if not, what is wrong with it? Nothing is changed.

Everything that the database names is read and compared with what the database says of it, and the journal must
explain every committed model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from fairfleet.common.errors import FleetError, StateDirError
from fairfleet.common.tensors import Model, Section
from fairfleet.server.bases import Bases
from fairfleet.server.committing import layer_sizes, read_model
from fairfleet.server.history import file_name
from fairfleet.server.journal import event_from_json
from fairfleet.server.publication import Publication
from fairfleet.server.rounds import ModelStored
from fairfleet.server.sealed import load_vectors, read_row
from fairfleet.server.store import Store
from fairfleet.server.uploads import rebuild


@dataclass(frozen=True)
class Findings:
    versions: int  # committed
    files: int  # read and compared
    problems: tuple[str, ...]


def check(store: Store) -> Findings:
    """All that is wrong, each in words; an empty list says that the directory is whole."""
    files, problems = 0, list[str]()
    for what, problem in (*_models(store), *_updates(store), *_history(store)):
        files += bool(what)
        problems += [problem] if problem else []
    problems += _journal(store)
    return Findings(store.current_round().number, files, tuple(problems))


Finding = tuple[str, str]  # a file that was looked at, and what is wrong with it, if anything


def _models(store: Store) -> Iterator[Finding]:
    kept = store.kept_models()
    number = store.current_round().number
    if number not in {stored.version for stored in kept}:
        yield "", f"the model of version {number}, the newest, is not kept"
    for stored in kept:
        yield stored.file, ""
        try:
            found = Publication.of(stored.version, read_model(store.folder / stored.file)).digest
        except StateDirError as error:
            yield "", str(error)
            continue
        if found != stored.digest:
            yield "", f"{stored.file}: its digest is {found.hex()[:16]}…, the database says {stored.digest.hex()[:16]}…"
        if stored.vectors_file:
            yield _readable(store, stored.vectors_file)


def _readable(store: Store, file: str) -> Finding:
    try:
        load_vectors(store.folder / file)
    except StateDirError as error:
        return file, str(error)
    return file, ""


def _updates(store: Store) -> Iterator[Finding]:
    number, row = store.current_round().number, Model.empty(store.signature())
    bases = Bases(store.folder / "bases", number)
    for update in store.updates_of(number):
        if update.file:
            yield update.file, ""
            try:
                rebuild(row, store.folder / update.file, update, bases)
            except FleetError as error:
                yield "", str(error)


def _history(store: Store) -> Iterator[Finding]:
    signature, named = store.signature(), store.history_rows()
    size = sum(layer_sizes(signature)) or signature.size(Section.PARAMETERS)
    for past in named:
        file = store.folder / "history" / file_name(past)
        where = str(file.relative_to(store.folder))
        try:
            row = read_row(file)
        except StateDirError as error:
            yield where, str(error)
            continue
        right = row.shape == (size,) and np.isfinite(row).all()
        yield where, "" if right else f"{where}: not {size} finite numbers"


def _journal(store: Store) -> list[str]:
    number, problems = store.current_round().number, list[str]()
    commits = Counter(
        event.version for event in map(event_from_json, store.journal()) if isinstance(event, ModelStored)
    )
    for version in range(1, number + 1):
        if commits[version] != 1:
            problems.append(f"the journal commits version {version} {commits[version]} times, not once")
    records = {record["round"]: record for record in store.records(0, number)}
    if sorted(records) != list(range(number)):
        problems.append(f"there are records of {len(records)} rounds; {number} were committed")
    digests = store.model_digests()
    for round_number, record in records.items():
        if bytes.fromhex(record["digest"]) != digests.get(round_number + 1):
            problems.append(f"round {round_number} speaks of another model than version {round_number + 1}")
    return problems
