"""`fairfleet server --check` finds all damage to a state directory and changes nothing."""

from __future__ import annotations

import contextlib
import hashlib
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.fleet import Fleet, free_port

pytestmark = pytest.mark.slow

SETTINGS = {
    "rule__name": "fedfv",
    "rule__tau": 2,
    "optimizer__name": "adam",
    "round__evaluate_every": 0,
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    fleet = Fleet(tmp_path_factory.mktemp("whole"))
    try:
        fleet.init()
        fleet.start_server(rounds=10_000, **SETTINGS)
        for name in ("a", "b"):
            fleet.start_client(name)
        fleet.wait_for_version(3)
        fleet.kill_server()
        yield fleet
    finally:
        fleet.end()


def contents(folder: Path) -> dict[str, str]:
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != "lock")
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in files
    }


def newest(folder: Path, pattern: str) -> Path:
    return sorted(folder.glob(pattern))[-1]


def cut_model(folder: Path) -> None:
    file = newest(folder, "models/*[0-9].safetensors")
    file.write_bytes(file.read_bytes()[:-100])


def flip_a_bit(pattern: str) -> Callable[[Path], None]:
    def flip(folder: Path) -> None:
        file = newest(folder, pattern)
        data = bytearray(file.read_bytes())
        data[-33] ^= 0x40
        file.write_bytes(data)

    return flip


def cut_vectors(folder: Path) -> None:
    file = newest(folder, "models/*.optimizer.*")
    file.write_bytes(file.read_bytes()[:-100])


def overwrite_page_of(table: str) -> Callable[[Path], None]:
    """Overwrite the first page of a file, as a disk might that writes to a wrong place."""

    def overwrite(folder: Path) -> None:
        with contextlib.closing(sqlite3.connect(folder / "federation.db")) as database:
            database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            (size,) = database.execute("PRAGMA page_size").fetchone()
            query = "SELECT rootpage FROM sqlite_master WHERE type = 'table' AND name = ?"
            (page,) = database.execute(query, [table]).fetchone()
        with open(folder / "federation.db", "r+b") as file:
            file.seek((page - 1) * size)
            file.write(b"\xff" * 200)

    return overwrite


def sql(statement: str) -> Callable[[Path], None]:
    def run(folder: Path) -> None:
        with sqlite3.connect(folder / "federation.db") as database:
            database.execute(statement)

    return run


DAMAGE = {
    "a truncated model": (cut_model, "safetensors"),
    "a model with a flipped bit": (flip_a_bit("models/*[0-9].safetensors"), "found digest"),
    "a model that is gone": (
        lambda folder: newest(folder, "models/*[0-9].safetensors").unlink(),
        "cannot read",
    ),
    "optimizer vectors that are gone": (
        lambda folder: newest(folder, "models/*.optimizer.*").unlink(),
        "optimizer",
    ),
    "optimizer vectors that are truncated": (cut_vectors, "optimizer"),
    "optimizer vectors with a flipped bit": (
        flip_a_bit("models/*.optimizer.*"),
        "does not match its checksum",
    ),
    "a history row with a flipped bit": (flip_a_bit("history/a@*"), "does not match its checksum"),
    "a history row that is gone": (lambda folder: newest(folder, "history/a@*").unlink(), "a@"),
    "a history row of nonsense": (
        lambda folder: newest(folder, "history/b@*").write_bytes(b"nonsense"),
        "b@",
    ),
    "a record that is gone": (sql("delete from rounds where round = 1"), "records of"),
    "a commit that the journal does not know": (
        sql("delete from journal where event like '%ModelStored%' and round = 1"),
        "commits version 2 0 times",
    ),
    "a record of another model": (
        sql("update models set digest = 'ab' where version = 1"),
        "the record of round 1 does not",
    ),
    "a record of nonsense": (
        sql("update rounds set record = '{nonsense' where round = 1"),
        "cannot be understood",
    ),
    **{
        f"a lost page of the table {table}": (overwrite_page_of(table), "federation.db")
        for table in ("updates", "evaluations", "trials", "journal", "rounds")
    },
}
# Damage that a server meets when it continues. Only `--check` reads the remaining files.
NOTICED_AT_THE_START = [
    what for what in DAMAGE if any(word in what for word in ("lost page", "optimizer", "history"))
] + ["a truncated model", "a model with a flipped bit", "a model that is gone"]


def test_the_directory_of_a_killed_server_is_intact_and_stays_unchanged(
    whole: Fleet, tmp_path: Path
) -> None:
    copy = shutil.copytree(whole.state, tmp_path / "state")
    assert (
        whole.run("server", "--check", "--state-dir", str(copy)).returncode == 0
    )  # this completes the write-ahead log
    before = contents(copy)
    done = whole.run("server", "--check", "--state-dir", str(copy))
    assert (done.returncode, done.stderr) == (0, "")
    assert "is intact: version" in done.stdout
    assert contents(copy) == before


@pytest.mark.parametrize("what", DAMAGE)
def test_damage_is_found_and_reported(whole: Fleet, tmp_path: Path, what: str) -> None:
    damage, said = DAMAGE[what]
    copy = shutil.copytree(whole.state, tmp_path / "state")
    damage(copy)
    before = contents(copy)
    done = whole.run("server", "--check", "--state-dir", str(copy))
    assert done.returncode == 3
    assert said in done.stderr
    after = contents(copy)
    assert {name: after[name] for name in after if "db" not in name} == {
        n: before[n] for n in before if "db" not in n
    }


@pytest.mark.parametrize("what", dict.fromkeys(NOTICED_AT_THE_START))
def test_a_server_refuses_to_continue_from_a_damaged_state(
    whole: Fleet, tmp_path: Path, what: str
) -> None:
    copy = shutil.copytree(whole.state, tmp_path / "state")
    DAMAGE[what][0](copy)
    words = [
        "server",
        "--state-dir",
        str(copy),
        "--listen",
        f"127.0.0.1:{free_port()}",
        "--set",
        "http.port=0",
    ]
    for path, value in SETTINGS.items():
        words += ["--set", f"{path.replace('__', '.')}={value}"]
    done = whole.run(*words)
    assert done.returncode == 3, done.stderr
    assert str(copy) in done.stderr
    assert "Traceback" not in done.stderr


def test_a_folder_without_a_federation_is_reported(whole: Fleet, tmp_path: Path) -> None:
    done = whole.run("server", "--check", "--state-dir", str(tmp_path / "nowhere"))
    assert done.returncode == 3
    assert "holds no federation" in done.stderr
    assert not (tmp_path / "nowhere").exists()
