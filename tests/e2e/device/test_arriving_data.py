"""Data that arrive later: a client waits for them, and its server learns how many there are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fairfleet.common.features import COUNTS
from fairfleet.proto.v1 import fleet_pb2 as pb
from tests.support.device import Device
from tests.support.fleet import Fleet, until


def clients(fleet: Fleet) -> dict[str, dict[str, Any]]:
    done = fleet.run("clients", "--server", fleet.address, "--json")
    records = [json.loads(line) for line in done.stdout.splitlines()]
    return {record["client"]: record for record in records}


@pytest.fixture(autouse=True)
def _look_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAIRFLEET_REFRESH_SECONDS", "0.1")


def test_a_client_without_data_waits_and_takes_part_when_they_arrive(
    fleet: Fleet, tmp_path: Path
) -> None:
    data = tmp_path / "samples"
    fleet.init()
    fleet.start_server(rounds=1, round__minimum_clients=2, round__evaluate_every=0)
    fleet.start_client("early")
    fleet.start_client("late", task="arriving", data=str(data))
    until(lambda: "late" in clients(fleet), "both clients to join")
    assert clients(fleet)["late"]["not_selected_because"] == "it has no training data yet"
    assert fleet.status().missing == 1
    data.write_text("70")
    fleet.wait_for_version(1)
    parts = {
        part["client"]: part["report"]["samples"] for part in fleet.records()[0]["contributions"]
    }
    assert parts == {"early": 10, "late": 70}
    assert "70 training samples now, 0 before" in fleet.log("late.log")


def test_changed_numbers_of_samples_reach_the_server_without_a_new_join(
    fleet: Fleet, tmp_path: Path
) -> None:
    data = tmp_path / "samples"
    data.write_text("30")
    fleet.init()
    fleet.start_server(rounds=100_000, round__minimum_clients=1, round__evaluate_every=0)
    fleet.start_client("ann", task="arriving", data=str(data))
    fleet.wait_for_version(1)
    assert clients(fleet)["ann"]["train_samples"] == "30"
    data.write_text("90")
    until(lambda: clients(fleet)["ann"]["train_samples"] == "90", "the new number")
    assert fleet.log("server.log").count("client ann joined") == 1


def test_a_training_that_finds_its_data_gone_is_given_up_and_the_client_stays(
    fleet: Fleet, tmp_path: Path
) -> None:
    """Nothing counts as a failure of the task: the client would end after three."""
    data = tmp_path / "samples"
    data.write_text("30")
    fleet.init()
    # A client that gave up is selected again after the round's deadline.
    settings = {"round__minimum_clients": 1, "round__evaluate_every": 0}
    fleet.start_server(rounds=100_000, round__deadline_seconds=0.5, **settings)
    fleet.start_client("ann", task="arriving", data=str(data))
    fleet.wait_for_version(1)
    data.unlink()
    until(lambda: clients(fleet)["ann"].get("not_selected_because"), "the client to wait")
    version = fleet.version()
    data.write_text("40")
    fleet.wait_for_version(version + 2)
    assert "failed" not in fleet.log("ann.log")


def test_a_client_whose_new_data_cannot_be_read_goes_on_with_what_it_has(
    fleet: Fleet, tmp_path: Path
) -> None:
    data = tmp_path / "samples"
    data.write_text("30")
    fleet.init()
    fleet.start_server(rounds=100_000, round__minimum_clients=1, round__evaluate_every=0)
    fleet.start_client("ann", task="arriving", data=str(data))
    fleet.wait_for_version(1)
    data.write_text("a damaged file")
    until(lambda: "looking for new data failed" in fleet.log("ann.log"), "a failed look")
    fleet.wait_for_version(fleet.version() + 5)
    assert fleet.log("ann.log").count("looking for new data failed") == 1
    data.write_text("40")
    until(lambda: clients(fleet)["ann"]["train_samples"] == "40", "the new number")


def test_an_older_client_that_says_nothing_of_its_data_is_selected(fleet: Fleet) -> None:
    fleet.init()
    fleet.start_server(rounds=1, round__minimum_clients=1)
    old = Device(fleet.address, "old")
    old.join()
    assert old.train_task().round == 0


def test_a_poll_changes_only_the_numbers_that_it_tells(fleet: Fleet) -> None:
    fleet.init()
    fleet.start_server(round__minimum_clients=1)
    device = Device(fleet.address, "ann")
    device.join(features=[COUNTS], test_samples=7)
    assert clients(fleet)["ann"]["not_selected_because"] == "it has no training data yet"
    request = pb.NextTaskRequest(session=device.session, train_samples=5)
    assert device.stub.NextTask(request, timeout=40).HasField("train")
    assert {key: clients(fleet)["ann"][key] for key in ("train_samples", "test_samples")} == {
        "train_samples": "5",
        "test_samples": "7",
    }
