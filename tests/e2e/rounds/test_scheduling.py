"""Which clients a real server selects, and when a round has enough updates."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from fairfleet.proto.v1 import fleet_pb2 as pb
from fairfleet.proto.v1 import operator_pb2 as op
from tests.support.device import Device
from tests.support.fleet import Fleet, until

FINISHED = {"exit_when_finished": True}


def test_over_selection_does_not_wait_for_the_slowest(fleet: Fleet) -> None:
    fleet.init()
    asks = {"round__clients": 2, "round__over_selection": 1.5, "round__minimum_clients": 3}
    fleet.start_server(rounds=3, **asks, **FINISHED)
    for name, trouble in (("a", "none"), ("b", "none"), ("sleeper", "hang")):
        fleet.start_client(name, trouble=trouble)
    fleet.wait_for_version(3)  # the deadline of 600 s was not waited for
    fleet.prove(3)
    assert all(record["dropped"] == ["sleeper"] for record in fleet.records())


def test_a_target_for_the_worst_served_clients_ends_the_federation(fleet: Fleet) -> None:
    fleet.init()
    fleet.start_server(
        rounds=10_000, round__evaluate_every=2, end__worst_10_percent=0.5, **FINISHED
    )
    for name in ("a", "b"):
        fleet.start_client(name)
    assert set(fleet.wait_clients().values()) == {0}
    assert fleet.version() == 2
    assert "the worst-served tenth reached 50.0 % accuracy" in fleet.log("server.log")


@pytest.mark.slow
def test_a_server_without_enough_clients_reports_the_number_and_ends(fleet: Fleet) -> None:
    fleet.init()
    fleet.start_server(round__minimum_clients=3, round__longest_wait_seconds=8, **FINISHED)
    fleet.start_client("lonely")
    assert fleet.server is not None
    assert fleet.server.wait(60) == 0
    assert "waiting for 2 more clients: 1 of at least 3 are connected" in fleet.log("server.log")
    until(lambda: fleet.clients["lonely"].poll() == 0, "the client to hear of it")


def test_every_client_is_selected_once_before_any_is_selected_twice(fleet: Fleet) -> None:
    fleet.init()
    fleet.start_server(
        rounds=4,
        round__clients=2,
        round__minimum_clients=4,
        round__selection="least_recent",
        **FINISHED,
    )
    for name in "abcd":
        fleet.start_client(name)
    fleet.wait_clients()
    turns = [{c["client"] for c in record["contributions"]} for record in fleet.records()]
    assert turns[0] | turns[1] == turns[2] | turns[3] == set("abcd")


@pytest.mark.slow
def test_a_client_that_a_full_round_did_not_need_keeps_its_place_in_the_order(fleet: Fleet) -> None:
    """Each round selects 3 of 4 clients and uses the first 2 updates.

    One client never delivers; it is still never left out twice in a row.
    """
    settings: dict[str, Any] = {
        "round__clients": 2,
        "round__over_selection": 1.5,
        "round__minimum_clients": 4,
    }
    settings |= {"round__selection": "least_recent", "lease_seconds": 60, "durability": "round"}
    fleet.init()
    fleet.start_server(rounds=10_000, **settings)
    slow = Device(fleet.address, "slow")
    slow.join()
    for name in "abc":
        fleet.start_client(name)
    fleet.wait_for_version(8)
    fleet.kill_server()
    restarted_at = fleet.version()
    fleet.start_server(rounds=10_000, **settings)
    slow.join()
    fleet.wait_for_version(restarted_at + 8)
    fleet.kill_server()
    records = fleet.records()
    selected = fleet.selections()[: len(records)]
    left_out = [{"a", "b", "c", "slow"} - clients for clients in selected]
    assert all(len(clients) == 1 for clients in left_out)
    assert all(now != before for before, now in itertools.pairwise(left_out))
    surplus = [set(record.get("surplus", ())) for record in records]
    assert all(
        "slow" in surplus[number] for number, clients in enumerate(selected) if "slow" in clients
    )
    assert sum("slow" in clients for clients in surplus) > 8


@pytest.mark.slow
def test_a_client_that_fails_repeatedly_does_not_stall_the_round(fleet: Fleet) -> None:
    """Two clients deliver, one is silent and one always fails: after two deadlines, two suffice."""
    fleet.init()
    fleet.start_server(rounds=1, round__deadline_seconds=2, lease_seconds=60)
    operator = fleet.operator()
    operator.Pause(op.PauseRequest())  # until all four are connected
    silent, failing = Device(fleet.address, "silent"), Device(fleet.address, "failing")
    silent.join()
    failing.join()
    for name in ("a", "b"):
        fleet.start_client(name)
    until(lambda: len(list(operator.Clients(op.ClientsRequest()))) == 4, "all to be there")
    operator.Resume(op.ResumeRequest())
    failing.fail_all_tasks()
    fleet.wait_for_version(1, 20)
    events = [
        json.loads(text) for (text,) in fleet.query("select event from journal where round = 0")
    ]
    chosen = [event["clients"] for event in events if event["event"] == "ClientsChosen"]
    assert sum("failing" in clients for clients in chosen) == 1
    assert {c["client"] for c in fleet.records()[0]["contributions"]} == {"a", "b"}


@pytest.mark.parametrize("restart", [False, True])
@pytest.mark.parametrize("durability", ["update", "round"])
def test_the_update_of_a_revoked_client_is_removed_from_the_current_round(
    fleet: Fleet, restart: bool, durability: str
) -> None:
    settings = {
        "rounds": 1,
        "round__minimum_clients": 2,
        "lease_seconds": 60,
        "durability": durability,
    }
    fleet.init()
    fleet.start_server(**settings)
    fleet.operator().Pause(op.PauseRequest())
    devices = {name: Device(fleet.address, name) for name in ("a", "b", "bad")}
    for device in devices.values():
        device.join()
    fleet.operator().Resume(op.ResumeRequest())
    for device in devices.values():
        device.train_task()
    for name in ("a", "bad"):
        deliver(devices[name])
    fleet.operator().Revoke(op.RevokeRequest(client="bad", reason="stolen"))
    assert not fleet.query("select * from updates where client = 'bad'")
    if restart:
        fleet.kill_server()
        fleet.start_server(**settings)
        for name in ("a", "b"):
            devices[name] = Device(fleet.address, name)
            devices[name].join()
    if restart and durability == "round":  # it was only in memory
        devices["a"].train_task()
        deliver(devices["a"])
    devices["b"].train_task()
    deliver(devices["b"])
    fleet.wait_for_version(1, 20)
    assert {c["client"] for c in fleet.records()[0]["contributions"]} == {"a", "b"}
    assert fleet.query("select client from updates order by client") == [("a",), ("b",)]


def deliver(device: Device) -> None:
    chunks, encoded = device.encode()
    assert device.send(device.open(encoded).upload, chunks).outcome == pb.OUTCOME_COUNTED


def test_a_revocation_recorded_by_an_older_server_takes_effect_at_the_start(fleet: Fleet) -> None:
    """Earlier versions left the update of a revoked client in the round."""
    settings = {"rounds": 1, "lease_seconds": 60}
    fleet.init()
    fleet.start_server(**settings)
    for name in ("a", "bad"):
        device = Device(fleet.address, name)
        device.join()
    device.train_task()
    deliver(device)
    fleet.kill_server()
    fleet.change("insert into revocations (client, reason) values ('bad', 'stolen')")
    fleet.start_server(**settings)
    assert not fleet.query("select * from updates")
    assert (
        json.loads(fleet.query("select value from meta where key = 'round'")[0][0])["received"]
        == []
    )


def test_a_server_raises_its_limit_of_open_files_to_the_maximum(fleet: Fleet) -> None:
    fleet.init()
    fleet.start_server()
    assert fleet.server is not None
    limits = (Path("/proc") / str(fleet.server.pid) / "limits").read_text()
    soft, hard = next(
        line.split()[3:5] for line in limits.splitlines() if line.startswith("Max open files")
    )
    assert soft == hard
