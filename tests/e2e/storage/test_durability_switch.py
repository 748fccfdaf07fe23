"""The setting `durability` may change between two starts of the server, also in mid-round."""

from __future__ import annotations

import pytest

from tests.support.fleet import Fleet, until


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after"),
    [("update", "round"), pytest.param("round", "update", marks=pytest.mark.slow)],
)
def test_durability_may_change_in_mid_round(fleet: Fleet, before: str, after: str) -> None:
    """Two of three updates have a receipt when the server is killed; the third comes later."""
    fleet.init()
    fleet.start_server(rounds=2, round__minimum_clients=3, lease_seconds=20, durability=before)
    events = fleet.watch()
    for name, shift in (("ann", 1), ("bob", 2)):
        fleet.start_client(name, shift=shift)
    fleet.start_client("slow", shift=3, step_seconds=3)
    until(lambda: sum(event.HasField("update_received") for event in events) == 2, "two updates")
    fleet.kill_server()
    stored_clients = fleet.query("select client from updates where round = 0 order by client")
    assert stored_clients == ([("ann",), ("bob",)] if before == "update" else [])
    fleet.start_server(
        rounds=2,
        round__minimum_clients=3,
        lease_seconds=20,
        durability=after,
        exit_when_finished=True,
    )
    assert set(fleet.wait_clients().values()) == {0}, fleet.log("server.log")
    assert fleet.server is not None
    assert fleet.server.wait(20) == 0, fleet.log("server.log")
    fleet.prove(2)
