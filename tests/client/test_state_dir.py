"""The default state directory of a client: by the platform's convention, as before on Linux."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from fairfleet.client.settings import default_state_dir

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="paths by the XDG convention")


def test_it_is_in_the_home_directory_if_nothing_is_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_state_dir() == tmp_path / ".local" / "state" / "fairfleet"


def test_it_follows_xdg_state_home_unless_that_is_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "states"))
    assert default_state_dir() == tmp_path / "states" / "fairfleet"
    monkeypatch.setenv("XDG_STATE_HOME", "")
    assert default_state_dir() == tmp_path / "home" / ".local" / "state" / "fairfleet"
