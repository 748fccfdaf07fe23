"""The lock of a state directory: one server at a time, released when its process dies."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fairfleet.common.errors import StateDirError
from fairfleet.server.storage import database
from fairfleet.server.storage.database import Database
from tests.support.flock_holder import flock_held


def test_the_lock_of_an_older_version_is_respected_until_its_server_dies(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    with flock_held(lock, writes_pid=True) as older:
        for _ in range(2):  # A refused server leaves the number of the other one in the file.
            with pytest.raises(StateDirError, match=rf"another server \(process {older.pid}\)"):
                Database(tmp_path)
    Database(tmp_path).close()


def test_the_lock_file_names_this_process_and_stays_after_the_end(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    lock.write_text("12345678901234567890")
    opened = Database(tmp_path)
    inode = lock.stat().st_ino
    with pytest.raises(StateDirError, match=rf"\(process {os.getpid()}\)"):
        Database(tmp_path)
    opened.close()
    assert (lock.read_text(), lock.stat().st_ino) == (str(os.getpid()), inode)
    Database(tmp_path).close()


def test_a_file_system_without_locks_is_reported_as_such(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(descriptor: int, *, blocking: bool) -> bool:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(database, "lock_descriptor", refuse)
    with pytest.raises(StateDirError, match=r"cannot lock .*No locks available.*--state-dir"):
        Database(tmp_path)
