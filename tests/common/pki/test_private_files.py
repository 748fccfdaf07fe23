"""State directories are accessible only to their owner, including existing ones."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from fairfleet.client.update.spool import Spool
from fairfleet.common.errors import StateDirError
from fairfleet.common.pki.private_files import tighten
from fairfleet.server.storage.store import Store


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


@pytest.fixture(autouse=True)
def careless_umask() -> object:
    before = os.umask(0)
    yield
    os.umask(before)


def test_a_new_state_directory_is_private(tmp_path: Path) -> None:
    Store(tmp_path / "state").close()
    assert mode(tmp_path / "state") == 0o700
    assert mode(tmp_path / "state" / "lock") == 0o600


def test_an_open_state_directory_is_tightened_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "state").mkdir(mode=0o755)
    with caplog.at_level(logging.WARNING):
        Store(tmp_path / "state").close()
    assert mode(tmp_path / "state") == 0o700
    assert "was open to other users (mode 755)" in caplog.text


def test_a_foreign_directory_keeps_its_mode(tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir(mode=0o755)
    (tmp_path / "photos" / "holiday.jpg").write_text("precious")
    with pytest.raises(StateDirError):
        Store(tmp_path / "photos")
    assert mode(tmp_path / "photos") == 0o755


def test_a_client_folder_is_private(tmp_path: Path) -> None:
    Spool(tmp_path / "new" / "device")
    (tmp_path / "old").mkdir(mode=0o777)
    Spool(tmp_path / "old")
    assert (mode(tmp_path / "new" / "device"), mode(tmp_path / "old")) == (0o700, 0o700)


def test_a_folder_of_another_user_gives_only_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give a folder away")
    (tmp_path / "volume").mkdir(mode=0o775)
    os.chown(tmp_path / "volume", 12345, -1)
    with caplog.at_level(logging.WARNING):
        tighten(tmp_path / "volume")
    assert mode(tmp_path / "volume") == 0o775
    assert "belongs to another user" in caplog.text
