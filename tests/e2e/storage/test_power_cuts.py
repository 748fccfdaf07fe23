"""Power cuts lose whatever was not fsynced, including file names, but break no promise.

strace records a real server while clients train, one of which is killed and restarted. The disk is
then cut at every moment of the recording. The real recovery opens what is left and must honour
every promise that any client had received by then. Killing a process cannot test this, because the
page cache survives the process.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fairfleet.common.reports import Evaluation
from fairfleet.common.wire import evaluation_out
from fairfleet.proto.v1 import fleet_pb2 as pb
from fairfleet.proto.v1 import operator_pb2
from fairfleet.server.app import open_store
from fairfleet.server.cli.check_state import check
from fairfleet.server.federation.coordinator import Coordinator
from fairfleet.server.settings import ServerSettings
from fairfleet.server.storage.evaluation_queries import evaluations_of
from fairfleet.server.storage.files.history_files import file_name
from fairfleet.server.storage.store import Store
from tests.support.device import Device
from tests.support.disk.cut_disk import CutDisk, always, coin, lay_out, never
from tests.support.disk.syscalls import Moment, moments, traced
from tests.support.fleet import Fleet, until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed"),
]

ROUNDS, KILLED_BEFORE = 8, 5
LATE = {1, 6}  # rounds that `slow` misses
SETTINGS: dict[str, Any] = {
    "rule": {"name": "fedfv", "tau": 5},
    "optimizer": {"name": "adam"},
    "round": {"minimum_clients": 3, "deadline_seconds": 1.5, "quorum": 0.6, "evaluate_every": 3},
    "codec": "raw32",
    "keep_models": 2,  # so that files are overwritten
    "lease_seconds": 60,
}
FLAT = {key: value for key, value in SETTINGS.items() if not isinstance(value, dict)} | {
    f"{key}__{inner}": value
    for key, section in SETTINGS.items()
    if isinstance(section, dict)
    for inner, value in section.items()
}


@dataclass(frozen=True)
class Promise:
    """A promise to a client, and when it was given: it must hold from then on."""

    given_at: float
    what: str
    holds: Callable[[Store], bool]


@dataclass(frozen=True)
class Recording:
    root: Path  # of the disk
    model: Path  # the initial one
    moments: list[list[Moment]]  # for each server process
    promises: list[Promise]
    values: dict[tuple[str, int], float]  # of updates, by client and round


class Watched(Fleet):
    """A fleet whose servers are traced."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.disk = folder / "disk"
        self.disk.mkdir()
        self.state = self.disk / "state"
        self.traces: list[Path] = []

    def prefix(self, name: str) -> list[str]:
        self.traces.append(self.folder / f"{len(self.traces)}.trace")
        return traced(self.traces[-1])

    def trace(self) -> list[Moment]:
        """Return the trace of the server that has just ended; strace ends after it."""
        assert self.server is not None
        ended = f"{self.server.pid} "
        until(
            lambda: any(line.startswith(ended) and "+++" in line for line in self._lines()),
            "the end of the trace",
        )
        return list(moments(self.traces[-1]))

    def _lines(self) -> list[str]:
        return self.traces[-1].read_text().splitlines()[-20:]


class Story:
    """Clients driven by hand, which record every promise of the server."""

    def __init__(self, fleet: Watched) -> None:
        self.fleet = fleet
        self.promises: list[Promise] = []
        self.values: dict[tuple[str, int], float] = {}

    def begin(self) -> None:
        self.fleet.start_server(**FLAT | {"rounds": 10_000})
        self.devices = [Device(self.fleet.address, name) for name in ("a", "b", "slow")]
        for device in self.devices:
            device.join(train_samples=10, test_samples=5)

    def end(self) -> list[Moment]:
        for device in self.devices:
            device.channel.close()
        return self.fleet.trace()

    def round(self, number: int) -> None:
        responses = [device.next_task() for device in self.devices]
        if responses[0].HasField("evaluate"):
            for device in self.devices:
                self._evaluate(device, responses[0].evaluate)
            responses = [device.next_task() for device in self.devices]
        for device, response in zip(self.devices, responses, strict=True):
            device.task = response.train
            assert device.task.round == number
            self._record_promise(
                f"version {number}", _knows_model(number, device.task.model.digest)
            )
        for device in self.devices[: 2 if number in LATE else 3]:
            self._send(device)
        if number in LATE:
            self.fleet.wait_for_version(number + 1)
            self._send(self.devices[2])

    def quiet(self) -> bool:
        """Return whether the files of the last round are deleted, the last action of a commit."""
        over = f"{self.fleet.version() - 1:08d}-"
        return self.fleet.status().asked == 3 and not list(
            (self.fleet.state / "uploads").glob(f"{over}*")
        )

    def _send(self, device: Device) -> None:
        number = device.task.round
        value = self.values[device.name, number] = 1.0 + number + len(device.name)
        chunks, encoded = device.encode(value)
        receipt = device.send(device.open(encoded).upload, chunks)
        assert receipt.durable
        late = device.name == "slow" and number in LATE
        assert receipt.outcome == (pb.OUTCOME_HISTORY if late else pb.OUTCOME_COUNTED)
        is_stored = _remembers if late else _counts
        self._record_promise(
            f"receipt of {device.name} for round {number}",
            is_stored(device.name, number, encoded.digest),
        )

    def _evaluate(self, device: Device, asked: pb.EvaluateTask) -> None:
        version = asked.model.version
        evaluation = evaluation_out(Evaluation(samples=5, loss=1.0, accuracy=0.5))
        request = pb.ReportEvaluationRequest(
            session=device.session, version=version, evaluation=evaluation
        )
        device.stub.ReportEvaluation(request, timeout=10)
        name = device.name
        self._record_promise(
            f"evaluation {version} of {name}", lambda store: name in evaluations_of(store, version)
        )

    def revoke(self, client: str) -> None:
        self.fleet.operator().Revoke(operator_pb2.RevokeRequest(client=client), timeout=10)
        self._record_promise(f"revocation of {client}", lambda store: client in store.revoked())

    def _record_promise(self, what: str, holds: Callable[[Store], bool]) -> None:
        self.promises.append(Promise(time.time(), what, holds))


def _knows_model(version: int, digest: bytes) -> Callable[[Store], bool]:
    return lambda store: (
        store.model_digest(version) == digest and store.current_round().number >= version
    )


def _counts(client: str, number: int, digest: bytes) -> Callable[[Store], bool]:
    """Return whether the update counts once: in its round, or in the record of that round."""

    def holds(store: Store) -> bool:
        update = store.update_of(client, number)
        if update is None or update.digest != digest:
            return False
        if store.current_round().number == number:
            return client in store.current_round().received and update.file is not None
        (record,) = store.records(number, number)
        return [part.client for part in record.contributions].count(client) == 1

    return holds


def _remembers(client: str, number: int, digest: bytes) -> Callable[[Store], bool]:
    """Return whether the value is stored, until the client reports a newer one."""

    def holds(store: Store) -> bool:
        newer = [
            past for past in store.history_rows() if past.client == client and past.round > number
        ]
        return bool(newer) or store.history_digest(client, number) == digest

    return holds


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Recording]:
    fleet = Watched(tmp_path_factory.mktemp("watched"))
    try:
        model = fleet.init()
        story = Story(fleet)
        story.begin()
        for number in range(KILLED_BEFORE):
            story.round(number)
        until(
            story.quiet, "the round to be over"
        )  # a call that was interrupted by the kill may or may not have happened
        fleet.kill_server()
        lives = [story.end()]
        story.begin()
        for number in range(KILLED_BEFORE, ROUNDS):
            story.round(number)
        story.revoke("mallory")
        assert fleet.stop_server() == 0
        lives.append(story.end())
        yield Recording(fleet.disk, model, lives, story.promises, story.values)
    finally:
        fleet.end()


# ---- cutting -------------------------------------------------------------------------------------

Files = dict[str, bytes | None]
Renamed = dict[str, bytes]
WORST = "nothing more"  # beyond the certain ones
SURVIVORS = {
    WORST: (lambda seed: never, lambda seed: never),
    "all names, no contents": (lambda seed: always, lambda seed: never),
    "all contents, no names": (lambda seed: never, lambda seed: always),
    "anything": (lambda seed: coin(seed), lambda seed: coin(seed + 1)),
}


def cuts(
    recording: Recording, survivors: str, ignored: Callable[[str], bool] = lambda path: False
) -> Iterator[tuple[float, Files, Renamed]]:
    """Yield each different disk that a cut can leave, with the last moment at which it can.

    Also yield what was in files when they got their names.
    """
    names, contents = SURVIVORS[survivors]
    disk = CutDisk(recording.root, ignored)
    before: tuple[float, Files] | None = None
    for life in recording.moments:
        disk.restarted()
        for index, moment in enumerate(life):
            cut_files = (
                disk.files(names(index), contents(index))
                if disk.changed
                else before[1]
                if before
                else {}
            )
            if before is not None and cut_files != before[1]:
                yield (*before, disk.renamed)
            before = (moment.at, cut_files)
            disk.take(moment)
    yield time.time(), disk.files(names(0), contents(0)), disk.renamed


class Judge:
    """Runs the real recovery on what a cut left, and reports what is wrong with the result."""

    def __init__(self, recording: Recording, folder: Path) -> None:
        self._recording = recording
        self._folder = folder

    def problems(self, at: float, files: Files, renamed: Renamed) -> list[str]:
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir()
        lay_out(files, self._folder)
        due = [promise for promise in self._recording.promises if promise.given_at <= at]
        try:
            found = self._look(due, renamed)
            asyncio.run(self._restart())
            return found + [f"after a restart: {problem}" for problem in self._look(due, renamed)]
        except Exception as error:
            return [f"{type(error).__name__}: {error}"]

    @property
    def settings(self) -> ServerSettings:
        given = {"state_dir": self._folder / "state", "model": self._recording.model}
        return ServerSettings.model_validate(SETTINGS | given)

    async def _restart(self) -> None:
        store = open_store(self.settings)
        try:
            coordinator = Coordinator(store, self.settings)
            await coordinator.start()
            await coordinator.stop()
        finally:
            store.close()

    def _look(self, due: list[Promise], renamed: Renamed) -> list[str]:
        if not (self._folder / "state").exists():
            return [
                f"{promise.what} is forgotten: there is no directory any more" for promise in due
            ]
        store = Store(self._folder / "state")
        try:
            if not store.has_federation:
                return [
                    f"{promise.what} is forgotten: there is no federation any more"
                    for promise in due
                ]
            forgotten = [
                f"{promise.what} is forgotten" for promise in due if not promise.holds(store)
            ]
            return [*check(store).problems, *forgotten, *self._damaged(store, renamed)]
        finally:
            store.close()

    def _damaged(self, store: Store, renamed: Renamed) -> Iterator[str]:
        """Check files without a digest:

        the optimizer's memory and the history must be as written.
        """
        for model in store.kept_models():
            if model.vectors_file:
                vectors = (store.folder / model.vectors_file).read_bytes()
                if vectors != renamed[f"state/{model.vectors_file}"]:
                    yield f"{model.vectors_file} is not what was written"
        for past in store.history_rows():
            row = np.load(store.folder / "history" / file_name(past), allow_pickle=False)
            if not (row == np.float32(self._recording.values[past.client, past.round])).all():
                yield f"the history of {past.client} is not its update of round {past.round}"


@pytest.fixture
def scratch(tmp_path: Path) -> Iterator[Path]:
    """Return a folder for thousands of recoveries, in memory if possible because each one syncs."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(
        dir=memory if os.access(memory, os.W_OK) else tmp_path
    ) as folder:
        yield Path(folder) / "disk"


def test_the_recording_contains_every_change_of_the_directory(recording: Recording) -> None:
    """Otherwise a write was not recorded, for example through a memory map."""
    disk = CutDisk(recording.root)
    for life in recording.moments:
        disk.restarted()
        for moment in life:
            disk.take(moment)
    state, seen = recording.root / "state", disk.files(always, always)
    there = {
        str(path.relative_to(recording.root)): path.read_bytes()
        for path in state.rglob("*")
        if path.is_file()
    }
    assert {path: content for path, content in seen.items() if content is not None} == there


@pytest.mark.parametrize("survivors", SURVIVORS)
def test_a_power_cut_at_any_moment_breaks_no_promise(
    recording: Recording, scratch: Path, survivors: str
) -> None:
    """Test every moment with only the certain writes, and about two hundred with more of them."""
    judge, disks = Judge(recording, scratch), list(cuts(recording, survivors))
    assert len(disks) > 100
    for moment, files, renamed in disks if survivors == WORST else disks[:: 1 + len(disks) // 200]:
        assert judge.problems(moment, files, renamed) == [], f"cut at {moment}"


FORGOTTEN: dict[str, Callable[[str], bool]] = {
    "the directory's own name": lambda path: path == "",
    "the names in the directory": lambda path: path == "state",
    "the database's log": lambda path: path.endswith("-wal"),
    "updates": lambda path: path.startswith("state/uploads/"),
    "the names of updates": lambda path: path == "state/uploads",
    "models and the optimizer's memory": lambda path: path.startswith("state/models/"),
    "the names of models": lambda path: path == "state/models",
    "rows of the history": lambda path: path.startswith("state/history/"),
    "the names of rows": lambda path: path == "state/history",
}


@pytest.mark.parametrize("what", FORGOTTEN)
def test_omitting_any_kind_of_fsync_is_detected(
    recording: Recording, scratch: Path, what: str
) -> None:
    """Without any one kind of fsync these tests fail, so each kind is needed."""
    judge = Judge(recording, scratch)
    disks = cuts(recording, WORST, ignored=FORGOTTEN[what])
    assert any(judge.problems(moment, files, renamed) for moment, files, renamed in disks)


def test_a_real_server_continues_after_a_power_cut(recording: Recording, tmp_path: Path) -> None:
    disks = [
        files
        for moment, files, _ in cuts(recording, "anything")
        if moment > recording.promises[0].given_at
    ]
    for number, files in enumerate(disks[:: len(disks) // 3]):
        fleet = Fleet(tmp_path / str(number))
        fleet.folder.mkdir()
        lay_out(files, fleet.folder)
        try:
            checked = fleet.run("server", "--check", "--state-dir", str(fleet.state))
            assert checked.returncode == 0, checked.stderr
            rounds = fleet.version() + 2
            fleet.start_server(rounds=rounds, **FLAT, exit_when_finished=True)
            for name in ("a", "b", "slow"):
                fleet.start_client(name)
            assert set(fleet.wait_clients().values()) == {0}
            assert fleet.version() == rounds
        finally:
            fleet.end()
