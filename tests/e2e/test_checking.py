"""`fairfleet server --check` finds whatever is wrong with a state directory, says what, and changes nothing."""

from __future__ import annotations

import hashlib
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.e2e.fleet import Fleet


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    fleet = Fleet(tmp_path_factory.mktemp("whole"))
    try:
        fleet.init()
        settings = {"rule__name": "fedfv", "rule__tau": 2, "optimizer__name": "adam", "round__evaluate_every": 0}
        fleet.start_server(rounds=10_000, **settings)
        for name in ("a", "b"):
            fleet.start_client(name)
        fleet.wait_for_version(3)
        fleet.kill_server()
        yield fleet
    finally:
        fleet.end()


def contents(folder: Path) -> dict[str, str]:
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != "lock")
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def newest(folder: Path, pattern: str) -> Path:
    return sorted(folder.glob(pattern))[-1]


def cut_model(folder: Path) -> None:
    file = newest(folder, "models/*[0-9].safetensors")
    file.write_bytes(file.read_bytes()[:-100])


def flip_a_bit(folder: Path) -> None:
    file = newest(folder, "models/*[0-9].safetensors")
    data = bytearray(file.read_bytes())
    data[-9] ^= 1
    file.write_bytes(data)


def sql(statement: str) -> Callable[[Path], None]:
    def run(folder: Path) -> None:
        with sqlite3.connect(folder / "federation.db") as database:
            database.execute(statement)

    return run


DAMAGE = {
    "a truncated model": (cut_model, "safetensors"),
    "a model with a flipped bit": (flip_a_bit, "its digest is"),
    "a model that is gone": (lambda folder: newest(folder, "models/*[0-9].safetensors").unlink(), "cannot read"),
    "optimizer vectors that are gone": (lambda folder: newest(folder, "models/*.optimizer.*").unlink(), "optimizer"),
    "a history row that is gone": (lambda folder: newest(folder, "history/a@*").unlink(), "a@"),
    "a history row of nonsense": (lambda folder: newest(folder, "history/b@*").write_bytes(b"nonsense"), "b@"),
    "a record that is gone": (sql("delete from rounds where round = 1"), "records of"),
    "a commit that the journal does not know": (
        sql("delete from journal where event like '%ModelStored%' and round = 1"),
        "commits version 2 0 times",
    ),
    "a record of another model": (
        sql("update models set digest = 'ab' where version = 1"),
        "round 0 speaks of",
    ),
}


def test_a_directory_that_a_killed_server_left_is_whole_and_stays_as_it_is(whole: Fleet, tmp_path: Path) -> None:
    copy = shutil.copytree(whole.state, tmp_path / "state")
    assert whole.run("server", "--check", "--state-dir", str(copy)).returncode == 0  # it settles the write-ahead log
    before = contents(copy)
    done = whole.run("server", "--check", "--state-dir", str(copy))
    assert (done.returncode, done.stderr) == (0, "")
    assert "is whole: version" in done.stdout
    assert contents(copy) == before


@pytest.mark.parametrize("what", DAMAGE)
def test_damage_is_found_and_said(whole: Fleet, tmp_path: Path, what: str) -> None:
    damage, said = DAMAGE[what]
    copy = shutil.copytree(whole.state, tmp_path / "state")
    damage(copy)
    before = contents(copy)
    done = whole.run("server", "--check", "--state-dir", str(copy))
    assert done.returncode == 3
    assert said in done.stderr
    after = contents(copy)
    assert {name: after[name] for name in after if "db" not in name} == {n: before[n] for n in before if "db" not in n}


def test_a_folder_without_a_federation_is_said_so(whole: Fleet, tmp_path: Path) -> None:
    done = whole.run("server", "--check", "--state-dir", str(tmp_path / "nowhere"))
    assert done.returncode == 3
    assert "holds no federation" in done.stderr
    assert not (tmp_path / "nowhere").exists()
