"""For all tests: where pytest runs in the background, the shell has told it to ignore Ctrl-C, and so would every
process that a test starts; but some tests send one and want to see it obeyed.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from tests.postgresql import PostgreSQL, postgresql_server

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def postgresql() -> Iterator[PostgreSQL]:
    with postgresql_server() as server:
        yield server


@pytest.fixture(params=["sqlite", "postgresql"])
def database(request: pytest.FixtureRequest) -> str | None:
    """Where a store keeps its facts: beside its files, or in a PostgreSQL."""
    if request.param == "sqlite":
        return None
    server: PostgreSQL = request.getfixturevalue("postgresql")
    return server.new_database()
