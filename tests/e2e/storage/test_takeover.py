"""Two processes use one client name while the link of one of them is cut."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.fleet import until
from tests.support.relay import Relay, RelayedFleet


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[RelayedFleet]:
    fleet = RelayedFleet(tmp_path)
    try:
        yield fleet
    finally:
        fleet.end()


@pytest.mark.parametrize(
    "restarted", [False, True], ids=["same server", "server restarted meanwhile"]
)
def test_a_process_that_was_disconnected_does_not_take_the_name_from_a_newer_one(
    fleet: RelayedFleet, restarted: bool
) -> None:
    fleet.init()
    fleet.start_server(round__minimum_clients=3, lease_seconds=60)
    relay = fleet.relay = Relay(fleet.port)
    older = fleet.clients["older"] = fleet.start_client("device")
    until(
        lambda: "joined" in fleet.log("device.log"),
        "the older process, which knows by then that it is the first",
    )
    relay.cut()
    fleet.relay = None
    newer = fleet.start_client("device")
    until(lambda: fleet.log("server.log").count("client device joined") == 2, "the newer process")
    if restarted:
        fleet.kill_server()
        fleet.start_server(round__minimum_clients=3, lease_seconds=60)
        until(
            lambda: fleet.log("server.log").count("client device joined") == 3,
            "the newer process again",
        )
    relay.repair()
    assert older.wait(60) != 0
    assert "another process joined as device and took over" in fleet.log("device.log")
    assert newer.poll() is None
    assert fleet.status().connected == 1
    relay.cut()


@pytest.mark.slow
def test_the_age_of_a_process_counts_from_its_join_of_this_federation(fleet: RelayedFleet) -> None:
    """The fences of a former federation, whose server was started more often, are larger."""
    settings = {"round__minimum_clients": 3, "lease_seconds": 60}
    fleet.init()
    for _ in range(3):
        fleet.start_server(**settings)
        fleet.kill_server()
    fleet.start_server(**settings)
    relay = fleet.relay = Relay(fleet.port)
    older = fleet.clients["older"] = fleet.start_client("device")
    until(lambda: "joined" in fleet.log("device.log"), "the older process")
    relay.cut()  # it accepts nothing while there is no server
    fleet.kill_server()
    fleet.state.rename(fleet.folder / "former-state")
    fleet.start_server(**settings)
    relay.repair()
    until(lambda: "goes on there" in fleet.log("device.log"), "the change of the federation")
    until(
        lambda: "joined" in fleet.log("device.log").split("goes on there")[1],
        "the older process again",  # it pauses between two federations
    )
    relay.cut()
    fleet.relay = None
    joins = fleet.log("server.log").count("client device joined")
    newer = fleet.start_client("device")
    until(
        lambda: fleet.log("server.log").count("client device joined") > joins, "the newer process"
    )
    fleet.kill_server()
    fleet.start_server(**settings)
    until(lambda: fleet.status().connected == 1, "the newer process again")
    relay.repair()
    assert older.wait(60) != 0
    assert newer.poll() is None
    relay.cut()
