"""Fixtures and settings for all tests.

Some tests interrupt a process. If pytest runs in the background, the shell has made it ignore
SIGINT, and every process that a test starts would ignore it too. So this module restores the
default handler.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from fairfleet.server.aggregation import conformance
from tests.support.fleet import Fleet
from tests.support.paths import SHARED
from tests.support.postgresql import PostgreSQL, postgresql_server

# Examples have no deadline, because machines are shared and noisy.
settings.register_profile("fairfleet", deadline=None)
settings.load_profile("fairfleet")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def postgresql() -> Iterator[PostgreSQL]:
    """Yield a PostgreSQL server for all tests."""
    with postgresql_server() as server:
        yield server


@pytest.fixture(params=["sqlite", "postgresql"])
def database(request: pytest.FixtureRequest) -> str | None:
    """Return the URL of a new PostgreSQL database; None for SQLite in the state directory."""
    if request.param == "sqlite":
        return None
    server: PostgreSQL = request.getfixturevalue("postgresql")
    return server.new_database()


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    """Yield real server and client processes on loopback, in a separate folder per test."""
    fleet = Fleet(tmp_path)
    try:
        yield fleet
    finally:
        fleet.end()


@pytest.fixture(scope="session")
def vector_folder() -> Path:
    """Return the folder of the shared test vectors; skip the test if there is none."""
    if not (SHARED / "vectors" / "cases.json").is_file():
        pytest.skip(
            f"no test vectors in {SHARED / 'vectors'}; set FAIRFLEET_SHARED to the shared folder"
        )
    return SHARED / "vectors"


@pytest.fixture(scope="session")
def shared_vectors(vector_folder: Path) -> conformance.Vectors:
    """Return the shared test vectors."""
    return conformance.load(vector_folder)
