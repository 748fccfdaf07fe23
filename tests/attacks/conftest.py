"""One server for all attacks of a module: it must bear them all, one after the other."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.attacks.siege import Siege


@pytest.fixture(scope="module")
def siege(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Siege]:
    siege = Siege(tmp_path_factory.mktemp("siege"))
    try:
        siege.bring_honest_client()
        yield siege
    finally:
        siege.end()
