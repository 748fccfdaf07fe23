"""The folder of decoded data sets: by the platform's convention, as before on Linux."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from fairfleet.lab.datasets.cache import VERSION, cache_folder


@pytest.mark.skipif(sys.platform != "linux", reason="paths by the XDG convention")
def test_it_is_in_the_users_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    below = Path("fairfleet", "datasets", f"v{VERSION}")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_folder() == tmp_path / ".cache" / below
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    assert cache_folder() == tmp_path / "caches" / below
    assert not (tmp_path / "caches").exists()
