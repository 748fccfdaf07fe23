"""A server with TLS, and two clients that keep training while tests attack the server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.secure import SecureFleet


@pytest.fixture(scope="package")
def standing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecureFleet]:
    """Yield the server that all attacks of this folder use; two real clients train all the time."""
    fleet = SecureFleet(tmp_path_factory.mktemp("secure"))
    fleet.init(1000)
    fleet.start_server(
        rounds=1_000_000, round__quorum=0.1, round__deadline_seconds=2, keep_models=2
    )
    for name in ("honest-1", "honest-2"):
        fleet.start_client(name, steps=1, step_seconds=0.2)
    fleet.wait_for_version(1)
    yield fleet
    assert fleet.server is not None
    assert fleet.server.poll() is None, fleet.log("server.log")
    assert "Traceback" not in fleet.log("server.log")
    fleet.end()


@pytest.fixture(autouse=True)
def _honest_clients_keep_training(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "standing" in request.fixturenames:
        fleet: SecureFleet = request.getfixturevalue("standing")
        assert all(process.poll() is None for process in fleet.clients.values())
        fleet.wait_for_version(fleet.version() + 1)


@pytest.fixture
def own(tmp_path: Path) -> Iterator[SecureFleet]:
    """Yield a fleet of the test's own, whose server is not started."""
    fleet = SecureFleet(tmp_path)
    try:
        yield fleet
    finally:
        fleet.end()
