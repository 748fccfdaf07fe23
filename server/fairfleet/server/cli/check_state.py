"""`fairfleet server --check`: find out whether a state directory is intact.

Every file that the database names is read and compared with what the database says about it, and
the journal must explain every committed model. Nothing is changed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from fairfleet.common.errors import FleetError, StateDirError
from fairfleet.common.names import round_name
from fairfleet.common.tensors import Model, Section
from fairfleet.server.aggregation.finite import is_finite, model_is_finite
from fairfleet.server.aggregation.staging import layer_sizes
from fairfleet.server.aggregation.stored_state import read_model
from fairfleet.server.rounds.serialization import event_from_json
from fairfleet.server.rounds.state_machine import Continued, Event, ModelStored
from fairfleet.server.storage.files.checksummed_arrays import load_vectors, read_scaled_row
from fairfleet.server.storage.files.history_files import file_name
from fairfleet.server.storage.operations.undone_rounds import standing_ranges
from fairfleet.server.storage.round_record import RoundRecord
from fairfleet.server.storage.store import Store
from fairfleet.server.transfer.prediction_bases import PredictionBases
from fairfleet.server.transfer.published_model import PublishedModel
from fairfleet.server.transfer.upload import rebuild


@dataclass(frozen=True)
class StateProblems:
    """The result of a check; without problems the directory is intact."""

    versions: int  # committed
    files: int  # read and compared
    problems: tuple[str, ...]  # one sentence each


def check(store: Store) -> StateProblems:
    """Read and compare everything in the state directory, and return all problems."""
    files, problems = 0, list[str]()
    for file, problem in (*_models(store), *_updates(store), *_history(store)):
        files += bool(file)
        problems += [problem] if problem else []
    problems += _journal(store)
    return StateProblems(store.current_round().number, files, tuple(problems))


Finding = tuple[str, str]  # a file that was checked, and its problem; either may be empty


def _models(store: Store) -> Iterator[Finding]:
    models = store.kept_models()
    newest = store.current_round().number
    if newest not in {stored.version for stored in models}:
        yield "", f"the newest model, version {newest}, is missing"
    for stored in models:
        yield stored.file, ""
        try:
            model = read_model(store.folder / stored.file)
        except StateDirError as error:
            yield "", str(error)
            continue
        digest = PublishedModel.of(stored.version, model).digest
        if digest != stored.digest:
            expected = f"expected {stored.digest.hex()[:16]}… from the database"
            yield "", f"{stored.file}: found digest {digest.hex()[:16]}…, {expected}"
        if not model_is_finite(model):
            yield "", f"{stored.file}: contains a value that is not finite"
        if stored.vectors_file:
            yield _readable(store, stored.vectors_file)


def _readable(store: Store, file: str) -> Finding:
    try:
        vectors = load_vectors(store.folder / file)
    except StateDirError as error:
        return file, str(error)
    if all(map(is_finite, vectors.values())):
        return file, ""
    return file, f"{file}: contains a value that is not finite"


def _updates(store: Store) -> Iterator[Finding]:
    number, row = store.current_round().number, Model.empty(store.signature())
    bases = PredictionBases(store.folder / "bases", number)
    for update in store.updates_of(number):
        if update.file:
            yield update.file, ""
            try:
                rebuild(row, store.folder / update.file, update, bases)
            except FleetError as error:
                yield "", str(error)


def _history(store: Store) -> Iterator[Finding]:
    signature = store.signature()
    size = sum(layer_sizes(signature)) or signature.size(Section.PARAMETERS)
    for history_row in store.history_rows():
        file = store.folder / "history" / file_name(history_row)
        relative = str(file.relative_to(store.folder))
        try:
            row, _ = read_scaled_row(file)
        except StateDirError as error:
            yield relative, str(error)
            continue
        is_valid = row.shape == (size,) and np.isfinite(row).all()
        yield relative, "" if is_valid else f"{relative}: expected {size} finite numbers"


def _journal(store: Store) -> list[str]:
    number, problems = store.current_round().number, list[str]()
    events = list(map(event_from_json, store.journal()))
    commits = Counter(
        event.version
        for event in events
        if isinstance(event, ModelStored)
        or (isinstance(event, Continued) and event.from_version is not None)
    )
    for version in range(1, number + 1):
        if commits[version] != 1:
            problems.append(
                f"the journal commits version {version} {commits[version]} times, expected once"
            )
    records = {record.round: record for record in store.records(0, number)}
    if sorted(records) != list(range(number)):
        problems.append(f"found records of {len(records)} rounds, expected {number}")
    digests = store.model_digests()
    for round_number, record in records.items():
        if record.digest != digests.get(round_number + 1):
            problems.append(
                f"the record of {round_name(round_number)} does not have the digest of "
                f"version {round_number + 1}"
            )
    return [*problems, *_undone(events, records, digests)]


def _undone(
    events: Sequence[Event], records: Mapping[int, RoundRecord], digests: Mapping[int, bytes]
) -> Iterator[str]:
    """Compare the rounds that are marked as undone with the returns in the journal."""
    returned, newest = dict[int, int](), len(records)
    for event in events:
        if isinstance(event, Continued) and event.from_version is not None:
            returned[event.version - 1] = event.from_version
            if digests.get(event.version) != digests.get(event.from_version):
                yield (
                    f"version {event.version} does not have the digest of version "
                    f"{event.from_version}, whose model it is"
                )
    standing = {
        number
        for first, last in standing_ranges(newest, returned)
        for number in range(first, last + 1)
    }
    for number, record in records.items():
        if record.undone is (number in standing):
            expected = "counts" if record.undone else "was undone"
            name = round_name(number)
            yield f"{name} {expected}, says the journal, but its record says otherwise"
