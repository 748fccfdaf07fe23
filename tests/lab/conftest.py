from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def no_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use a separate cache, and no data but what the test makes."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("FAIRFLEET_DATA", raising=False)
