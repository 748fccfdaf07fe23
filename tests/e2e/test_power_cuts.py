"""The power fails, and the disk forgets whatever was not fsynced, names of files included: still nothing is lost.

A real server is watched by strace while clients train, one is killed and restarted, and then the disk is cut at every
single moment of its life. What is left is given to the real recovery, which must honour everything that any client
had been told by then. A kill proves none of this: the page cache outlives the process.
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
from fairfleet.server.checking import check
from fairfleet.server.coordinator import Coordinator
from fairfleet.server.evaluation_records import evaluations_of
from fairfleet.server.history import file_name
from fairfleet.server.serve import open_store
from fairfleet.server.settings import ServerSettings
from fairfleet.server.store import Store
from tests.e2e.cut_disk import CutDisk, always, coin, lay_out, never
from tests.e2e.device import Device
from tests.e2e.fleet import Fleet, until
from tests.e2e.syscalls import Moment, moments, traced

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
    "keep_models": 2,  # so that files are written over
    "lease_seconds": 60,
}
FLAT = {key: value for key, value in SETTINGS.items() if not isinstance(value, dict)} | {
    f"{key}__{inner}": value
    for key, section in SETTINGS.items()
    if isinstance(section, dict)
    for inner, value in section.items()
}


@dataclass(frozen=True)
class Told:
    """What somebody was told, and when: from then on it must be true, whatever happens."""

    at: float
    what: str
    kept: Callable[[Store], bool]


@dataclass(frozen=True)
class Recording:
    root: Path  # of the disk
    model: Path  # the initial one
    moments: list[list[Moment]]  # of each server process
    told: list[Told]
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
        """Of the server that has just ended; strace ends after it."""
        assert self.server is not None
        ended = f"{self.server.pid} "
        until(lambda: any(line.startswith(ended) and "+++" in line for line in self._lines()), "the end of the trace")
        return list(moments(self.traces[-1]))

    def _lines(self) -> list[str]:
        return self.traces[-1].read_text().splitlines()[-20:]


class Story:
    """Clients made by hand, which write down everything that they are told."""

    def __init__(self, fleet: Watched) -> None:
        self.fleet = fleet
        self.told: list[Told] = []
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
            self._tell(f"version {number}", _knows_model(number, device.task.model.digest))
        for device in self.devices[: 2 if number in LATE else 3]:
            self._send(device)
        if number in LATE:
            self.fleet.wait_for_version(number + 1)
            self._send(self.devices[2])

    def quiet(self) -> bool:
        """The last round's files were put away, which is the last thing that a commit does."""
        over = f"{self.fleet.version() - 1:08d}-"
        return self.fleet.status().asked == 3 and not list((self.fleet.state / "uploads").glob(f"{over}*"))

    def _send(self, device: Device) -> None:
        number = device.task.round
        value = self.values[device.name, number] = 1.0 + number + len(device.name)
        chunks, encoded = device.encode(value)
        receipt = device.send(device.open(encoded).upload, chunks)
        assert receipt.durable
        late = device.name == "slow" and number in LATE
        assert receipt.outcome == (pb.OUTCOME_HISTORY if late else pb.OUTCOME_COUNTED)
        kept = _remembers if late else _counts
        self._tell(f"receipt of {device.name} for round {number}", kept(device.name, number, encoded.digest))

    def _evaluate(self, device: Device, asked: pb.EvaluateTask) -> None:
        version = asked.model.version
        evaluation = evaluation_out(Evaluation(samples=5, loss=1.0, accuracy=0.5))
        request = pb.ReportEvaluationRequest(session=device.session, version=version, evaluation=evaluation)
        device.stub.ReportEvaluation(request, timeout=10)
        name = device.name
        self._tell(f"evaluation {version} of {name}", lambda store: name in evaluations_of(store, version))

    def revoke(self, client: str) -> None:
        self.fleet.operator().Revoke(operator_pb2.RevokeRequest(client=client), timeout=10)
        self._tell(f"revocation of {client}", lambda store: client in store.revoked())

    def _tell(self, what: str, kept: Callable[[Store], bool]) -> None:
        self.told.append(Told(time.time(), what, kept))


def _knows_model(version: int, digest: bytes) -> Callable[[Store], bool]:
    return lambda store: store.model_digest(version) == digest and store.current_round().number >= version


def _counts(client: str, number: int, digest: bytes) -> Callable[[Store], bool]:
    """In its round, or, once that is committed, in the round's record; and once only."""

    def kept(store: Store) -> bool:
        update = store.update_of(client, number)
        if update is None or update.digest != digest:
            return False
        if store.current_round().number == number:
            return client in store.current_round().received and update.file is not None
        (record,) = store.records(number, number)
        return [c["client"] for c in record["contributions"]].count(client) == 1

    return kept


def _remembers(client: str, number: int, digest: bytes) -> Callable[[Store], bool]:
    """Until the client says something newer."""

    def kept(store: Store) -> bool:
        newer = [past for past in store.history_rows() if past.client == client and past.round > number]
        return bool(newer) or store.history_digest(client, number) == digest

    return kept


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Recording]:
    fleet = Watched(tmp_path_factory.mktemp("watched"))
    try:
        model = fleet.init()
        story = Story(fleet)
        story.begin()
        for number in range(KILLED_BEFORE):
            story.round(number)
        until(story.quiet, "the round to be over")  # a call that dies with its process may have happened or not
        fleet.kill_server()
        lives = [story.end()]
        story.begin()
        for number in range(KILLED_BEFORE, ROUNDS):
            story.round(number)
        story.revoke("mallory")
        assert fleet.stop_server() == 0
        lives.append(story.end())
        yield Recording(fleet.disk, model, lives, story.told, story.values)
    finally:
        fleet.end()


# ---- cutting -------------------------------------------------------------------------------------

Files = dict[str, bytes | None]
Renamed = dict[str, bytes]
WORST = "nothing more"  # than what is certain
SURVIVORS = {
    WORST: (lambda seed: never, lambda seed: never),
    "all names, no contents": (lambda seed: always, lambda seed: never),
    "all contents, no names": (lambda seed: never, lambda seed: always),
    "anything": (lambda seed: coin(seed), lambda seed: coin(seed + 1)),
}


def cuts(
    recording: Recording, survivors: str, ignored: Callable[[str], bool] = lambda path: False
) -> Iterator[tuple[float, Files, Renamed]]:
    """Every different disk that a cut can leave, with the last moment at which it can; and what was in files when
    they got their names."""
    names, contents = SURVIVORS[survivors]
    disk = CutDisk(recording.root, ignored)
    before: tuple[float, Files] | None = None
    for life in recording.moments:
        disk.restarted()
        for at, moment in enumerate(life):
            left = disk.files(names(at), contents(at)) if disk.changed else before[1] if before else {}
            if before is not None and left != before[1]:
                yield (*before, disk.renamed)
            before = (moment.at, left)
            disk.take(moment)
    yield time.time(), disk.files(names(0), contents(0)), disk.renamed


class Judge:
    """Gives what a cut left to the real recovery, and says what is wrong with the outcome."""

    def __init__(self, recording: Recording, folder: Path) -> None:
        self._recording = recording
        self._folder = folder

    def problems(self, at: float, files: Files, renamed: Renamed) -> list[str]:
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir()
        lay_out(files, self._folder)
        due = [told for told in self._recording.told if told.at <= at]
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

    def _look(self, due: list[Told], renamed: Renamed) -> list[str]:
        if not (self._folder / "state").exists():
            return [f"{told.what} is forgotten: there is no directory any more" for told in due]
        store = Store(self._folder / "state")
        try:
            if not store.has_federation:
                return [f"{told.what} is forgotten: there is no federation any more" for told in due]
            forgotten = [f"{told.what} is forgotten" for told in due if not told.kept(store)]
            return [*check(store).problems, *forgotten, *self._damaged(store, renamed)]
        finally:
            store.close()

    def _damaged(self, store: Store, renamed: Renamed) -> Iterator[str]:
        """What no digest speaks of: the optimizer's memory and the history must be what was written."""
        for model in store.kept_models():
            if model.vectors_file:
                found = (store.folder / model.vectors_file).read_bytes()
                if found != renamed[f"state/{model.vectors_file}"]:
                    yield f"{model.vectors_file} is not what was written"
        for past in store.history_rows():
            row = np.load(store.folder / "history" / file_name(past), allow_pickle=False)
            if not (row == np.float32(self._recording.values[past.client, past.round])).all():
                yield f"the history of {past.client} is not its update of round {past.round}"


@pytest.fixture
def scratch(tmp_path: Path) -> Iterator[Path]:
    """Where recoveries are tried, by the thousand: in memory where that can be had, because they all sync."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else tmp_path) as folder:
        yield Path(folder) / "disk"


def test_the_recording_is_all_that_happened_to_the_directory(recording: Recording) -> None:
    """Else a write went unseen, through a memory map say, and the cuts would be of another disk."""
    disk = CutDisk(recording.root)
    for life in recording.moments:
        disk.restarted()
        for moment in life:
            disk.take(moment)
    state, seen = recording.root / "state", disk.files(always, always)
    there = {str(path.relative_to(recording.root)): path.read_bytes() for path in state.rglob("*") if path.is_file()}
    assert {path: content for path, content in seen.items() if content is not None} == there


@pytest.mark.parametrize("survivors", SURVIVORS)
def test_whenever_the_power_fails_nothing_that_anybody_was_told_is_lost(
    recording: Recording, scratch: Path, survivors: str
) -> None:
    """With nothing but what is certain, at every moment; with more than that, at some two hundred."""
    judge, left = Judge(recording, scratch), list(cuts(recording, survivors))
    assert len(left) > 100
    for at, files, renamed in left if survivors == WORST else left[:: 1 + len(left) // 200]:
        assert judge.problems(at, files, renamed) == [], f"cut at {at}"


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
def test_one_fsync_less_would_be_noticed(recording: Recording, scratch: Path, what: str) -> None:
    """Each kind is needed, and these tests would see that it is missing."""
    judge = Judge(recording, scratch)
    left = cuts(recording, WORST, ignored=FORGOTTEN[what])
    assert any(judge.problems(at, files, renamed) for at, files, renamed in left)


def test_a_real_server_goes_on_where_the_power_failed(recording: Recording, tmp_path: Path) -> None:
    left = [files for at, files, _ in cuts(recording, "anything") if at > recording.told[0].at]
    for number, files in enumerate(left[:: len(left) // 3]):
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
