"""Fixtures and settings for all tests.

Some tests interrupt a process. If pytest runs in the background, the shell has made it ignore
SIGINT, and every process that a test starts would ignore it too. So this module restores the
default handler.

Tests that need PyTorch are skipped where it is not installed (`make test TORCH=none`): what imports
it needs no mark, and what starts a process that imports it is marked `torch`.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Generator, Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import settings

from fairfleet.server.aggregation import conformance
from tests.support.fleet import Fleet
from tests.support.paths import SHARED
from tests.support.postgresql import PostgreSQL, postgresql_server

HAS_TORCH = find_spec("torch") is not None
NO_TORCH = "PyTorch is not installed"
CollectReports = Generator[None, pytest.CollectReport, pytest.CollectReport]
Steps = Generator[None, object, object]

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


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> CollectReports:
    """Skip a module that cannot be imported without PyTorch, if PyTorch is not installed."""
    report = yield
    if (
        report.outcome == "failed"
        and not HAS_TORCH
        and "No module named 'torch'" in str(report.longrepr)
    ):
        report.outcome = "skipped"
        report.longrepr = (str(collector.path), 0, f"Skipped: {NO_TORCH}")
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Steps:
    """Skip a test that is marked `torch`, or whose fixtures import PyTorch, without PyTorch."""
    if not HAS_TORCH and item.get_closest_marker("torch"):
        pytest.skip(NO_TORCH)
    with skipped_without_torch():
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Steps:
    """Skip a test that imports PyTorch in its function, without PyTorch."""
    with skipped_without_torch():
        return (yield)


@contextlib.contextmanager
def skipped_without_torch() -> Iterator[None]:
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        pytest.skip(NO_TORCH)
