"""Whom a real server asks, and when it has had enough."""

from __future__ import annotations

from pathlib import Path

from tests.e2e.fleet import Fleet, until

FINISHED = {"exit_when_finished": True}


def test_over_selection_does_not_wait_for_the_slowest(fleet: Fleet) -> None:
    fleet.init()
    asks = {"round__clients": 2, "round__over_selection": 1.5, "round__minimum_clients": 3}
    fleet.start_server(rounds=3, **asks, **FINISHED)
    for name, trouble in (("a", "none"), ("b", "none"), ("sleeper", "hang")):
        fleet.start_client(name, trouble=trouble)
    fleet.wait_for_version(3)  # the deadline is 600 s: nobody waited for it
    fleet.prove(3)
    assert all(record["dropped"] == ["sleeper"] for record in fleet.records())


def test_a_target_for_the_worst_served_ends_the_federation(fleet: Fleet) -> None:
    fleet.init()
    fleet.start_server(rounds=10_000, round__evaluate_every=2, end__worst_10_percent=0.5, **FINISHED)
    for name in ("a", "b"):
        fleet.start_client(name)
    assert set(fleet.wait_clients().values()) == {0}
    assert fleet.version() == 2
    assert "the worst-served tenth reached 50.0 % accuracy" in fleet.log("server.log")


def test_a_server_that_waits_in_vain_says_for_how_many_and_ends(fleet: Fleet) -> None:
    fleet.init()
    fleet.start_server(round__minimum_clients=3, round__longest_wait_seconds=8, **FINISHED)
    fleet.start_client("lonely")
    assert fleet.server is not None
    assert fleet.server.wait(60) == 0
    assert "waiting for 2 more clients: 1 of at least 3 are connected" in fleet.log("server.log")
    until(lambda: fleet.clients["lonely"].poll() == 0, "the client to hear of it")


def test_everyone_has_a_turn_before_anyone_has_a_second(fleet: Fleet) -> None:
    fleet.init()
    fleet.start_server(
        rounds=4, round__clients=2, round__minimum_clients=4, round__selection="least_recent", **FINISHED
    )
    for name in "abcd":
        fleet.start_client(name)
    fleet.wait_clients()
    turns = [{c["client"] for c in record["contributions"]} for record in fleet.records()]
    assert turns[0] | turns[1] == turns[2] | turns[3] == set("abcd")


def test_a_server_may_have_as_many_connections_as_the_system_allows(fleet: Fleet) -> None:
    fleet.init()
    fleet.start_server()
    assert fleet.server is not None
    limits = (Path("/proc") / str(fleet.server.pid) / "limits").read_text()
    soft, hard = next(line.split()[3:5] for line in limits.splitlines() if line.startswith("Max open files"))
    assert soft == hard
