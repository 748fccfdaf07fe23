"""The client's ledger: what was recorded stays charged, whatever happens to the process."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairfleet.client.privacy.ledger import FILE, LedgerEntry, ReleaseLedger
from fairfleet.common.errors import StateDirError

UPDATE = LedgerEntry("f", "update", 0, "aa", 0.25)


def release(number: int, cost: float = 0.25, federation: str = "f") -> LedgerEntry:
    return LedgerEntry(federation, "update", number, f"{number:04x}", cost)


def test_a_release_is_charged_once_however_often_it_is_sent_again(tmp_path: Path) -> None:
    ledger = ReleaseLedger(tmp_path)
    assert ledger.record(UPDATE)
    assert not ledger.record(UPDATE)
    assert not ReleaseLedger(tmp_path).record(UPDATE), "nor by a later process"
    assert ReleaseLedger(tmp_path).total == ledger.total == 0.25


def test_all_federations_of_a_client_count_together(tmp_path: Path) -> None:
    ledger = ReleaseLedger(tmp_path)
    ledger.record(release(0))
    ledger.record(release(0, cost=0.5, federation="g"))
    assert ledger.total == 0.75
    assert dict(ReleaseLedger(tmp_path).costs) == {"f": 0.25, "g": 0.5}


def test_a_refused_release_leaves_no_trace(tmp_path: Path) -> None:
    ledger = ReleaseLedger(tmp_path)
    ledger.record(release(0))
    before = (tmp_path / FILE).read_bytes()

    def refuse(total: float) -> None:
        assert total == 0.5
        raise ValueError("too much")

    with pytest.raises(ValueError, match="too much"):
        ledger.record(release(1), refuse)
    assert (tmp_path / FILE).read_bytes() == before
    assert ReleaseLedger(tmp_path).total == 0.25


KILLED = """
import os, sys
from pathlib import Path
from fairfleet.client.privacy.ledger import LedgerEntry, ReleaseLedger
ledger = ReleaseLedger(Path(sys.argv[1]))
ledger.record(LedgerEntry("f", "update", 0, "aa", 0.25))
os.kill(os.getpid(), 9)  # before it could send anything
"""


def test_a_client_killed_between_record_and_send_has_charged(tmp_path: Path) -> None:
    killed = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], check=False)
    assert killed.returncode == -9
    assert ReleaseLedger(tmp_path).total == 0.25


def test_a_release_is_durable_before_record_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[bytes] = []
    real = os.fsync

    def fsync(descriptor: int) -> None:
        real(descriptor)
        path = tmp_path / FILE
        synced.append(path.read_bytes())

    monkeypatch.setattr(os, "fsync", fsync)
    ReleaseLedger(tmp_path).record(UPDATE)
    assert b'"aa"' in synced[-1], "the line is written before the last sync"
    assert len(synced) == 2, "and the name of the new file is synced as well"


@given(cut=st.integers(0, 400), first=st.integers(1, 3))
def test_a_power_cut_in_a_line_loses_at_most_the_release_that_was_not_sent(
    tmp_path_factory: pytest.TempPathFactory, cut: int, first: int
) -> None:
    folder = tmp_path_factory.mktemp("ledger")
    ledger = ReleaseLedger(folder)
    for number in range(first):
        ledger.record(release(number))
    durable = (folder / FILE).stat().st_size
    ledger.record(release(first))
    whole = (folder / FILE).stat().st_size
    size = min(durable + cut, whole)
    os.truncate(folder / FILE, size)  # all that was fsynced before is there
    after = ReleaseLedger(folder)
    complete = size >= whole - 1  # the line's end does not matter
    assert after.total == 0.25 * (first + (1 if complete else 0))
    after.record(release(99))
    assert ReleaseLedger(folder).total == after.total


def line(**changes: Any) -> bytes:
    return json.dumps({**release(7)._asdict(), "unix_seconds": 1.0, **changes}).encode()


@pytest.mark.parametrize(
    "line",
    [
        b"{}",
        b"[]",
        b"",
        b"\0" * 80,
        b"not json",
        b'{"federation": "f"}',
        pytest.param(line(cost="0.25"), id="a cost that is text"),
        pytest.param(line(cost=-0.25), id="a cost that would reduce the count"),
        pytest.param(line(cost=math.nan), id="a cost that no limit exceeds"),
        pytest.param(line(kind="gift"), id="an unknown kind"),
        pytest.param(line(number="7"), id="a number that is text"),
        pytest.param(line(federation=None), id="no federation"),
    ],
)
def test_a_damaged_ledger_stops_the_client(tmp_path: Path, line: bytes) -> None:
    ReleaseLedger(tmp_path).record(UPDATE)
    with open(tmp_path / FILE, "ab") as file:
        file.write(line + b"\n")
    with pytest.raises(StateDirError, match="is damaged") as refused:
        ReleaseLedger(tmp_path)
    assert "backup" in str(refused.value)


def test_a_release_without_noise_is_infinite_also_after_a_restart(tmp_path: Path) -> None:
    ReleaseLedger(tmp_path).record(UPDATE._replace(cost=math.inf))
    assert math.isinf(ReleaseLedger(tmp_path).total)


WRITER = """
import sys
from pathlib import Path
from fairfleet.client.privacy.ledger import LedgerEntry, ReleaseLedger
ledger = ReleaseLedger(Path(sys.argv[1]))
def check(total):
    if total > 10:
        raise SystemExit(0)
for number in range(1000):
    ledger.record(LedgerEntry("f", "update", number, sys.argv[2] + str(number), 0.25), check)
"""


def test_two_processes_together_do_not_exceed_a_limit(tmp_path: Path) -> None:
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path), name]) for name in "ab"
    ]
    assert [writer.wait(60) for writer in writers] == [0, 0]
    assert ReleaseLedger(tmp_path).total == 10
    lines = [json.loads(line) for line in (tmp_path / FILE).read_text().splitlines()]
    assert len(lines) == len({line["what"] for line in lines}) == 40


def test_a_whole_line_without_its_end_is_kept(tmp_path: Path) -> None:
    """As an editor may leave it, or a power cut just before the line's end was on the disk."""
    ledger = ReleaseLedger(tmp_path)
    ledger.record(release(0))
    ledger.record(release(1))
    os.truncate(tmp_path / FILE, (tmp_path / FILE).stat().st_size - 1)
    assert ReleaseLedger(tmp_path).total == 0.5
    ReleaseLedger(tmp_path).record(release(2))
    assert ReleaseLedger(tmp_path).total == 0.75


def test_a_ledger_that_is_removed_while_its_client_runs_stops_the_client(tmp_path: Path) -> None:
    ledger = ReleaseLedger(tmp_path)
    ledger.record(release(0))
    (tmp_path / FILE).unlink()
    with pytest.raises(StateDirError, match="removed or replaced"):
        ledger.record(release(1))
    assert not (tmp_path / FILE).exists(), "the owner can restore it"


def test_an_older_copy_that_is_put_back_while_its_client_runs_stops_the_client(
    tmp_path: Path,
) -> None:
    ledger = ReleaseLedger(tmp_path)
    ledger.record(release(0))
    copy = (tmp_path / FILE).read_bytes()
    ledger.record(release(1))
    (tmp_path / FILE).write_bytes(copy)
    with pytest.raises(StateDirError, match="removed or replaced"):
        ledger.record(release(2))


def test_another_ledger_in_its_place_stops_the_client(tmp_path: Path) -> None:
    ledger = ReleaseLedger(tmp_path)
    ledger.record(release(0))
    other = ReleaseLedger(tmp_path.parent)
    for number in range(10, 20):
        other.record(release(number, 0.001))
    (tmp_path.parent / FILE).replace(tmp_path / FILE)
    with pytest.raises(StateDirError, match="removed or replaced"):
        ledger.record(release(1))


FULL_DISK = """
import os, resource, signal, sys
from pathlib import Path
from fairfleet.client.privacy.ledger import LedgerEntry, ReleaseLedger
from fairfleet.common.errors import StateDirError
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # the write fails instead, as on a full disk
ledger = ReleaseLedger(Path(sys.argv[1]))
ledger.record(LedgerEntry("f", "update", 0, "aa", 0.25))
size = (Path(sys.argv[1]) / "releases.jsonl").stat().st_size
for room in (0, 20, 5):
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + room, resource.RLIM_INFINITY))
    try:
        ledger.record(LedgerEntry("f", "update", 1, "bb", 0.5))
    except StateDirError as error:
        assert "cannot record" in str(error), error
    else:
        raise SystemExit("recorded without room")
file = Path(sys.argv[1]) / "releases.jsonl"
os.truncate(file, size - 1)  # a whole line without its end
resource.setrlimit(resource.RLIMIT_FSIZE, (size - 1, resource.RLIM_INFINITY))
try:
    ReleaseLedger(Path(sys.argv[1]))
except StateDirError:
    assert file.stat().st_size == size - 1, "the release in it was lost"
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
ledger = ReleaseLedger(Path(sys.argv[1]))
assert ledger.record(LedgerEntry("f", "update", 1, "bb", 0.5))
"""


def test_a_full_disk_stops_a_release_and_leaves_the_ledger_whole(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(tmp_path)], check=False, capture_output=True
    )
    assert done.returncode == 0, done.stderr
    assert ReleaseLedger(tmp_path).total == 0.75


def test_a_release_whose_record_could_not_be_synced_is_recorded_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system may have dropped what it could not write, so it is not enough to sync again."""
    ledger = ReleaseLedger(tmp_path)
    ledger.record(release(0))

    def broken(descriptor: int) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", broken)
        with pytest.raises(StateDirError, match="nothing is sent"):
            ledger.record(UPDATE)
    assert ledger.record(UPDATE), "it is new, not known from the failed try"
    assert ReleaseLedger(tmp_path).total == 0.5


def test_what_a_killed_process_left_is_made_durable_before_it_is_relied_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / FILE).write_bytes(line() + b"\n")  # written, but its process was killed then
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", synced.append)
    ledger = ReleaseLedger(tmp_path)
    assert len(synced) == 2, "its name and its content"
    assert not ledger.record(release(7))
