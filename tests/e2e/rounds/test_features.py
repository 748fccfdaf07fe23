"""Clients of different versions in one federation: who is selected, and what an operator sees."""

from __future__ import annotations

import json
import sys
from importlib.metadata import version
from typing import Any

import grpc

from fairfleet.common.features import CLIENT_FEATURES, FEATURES
from fairfleet.proto.v1 import fleet_pb2 as pb
from tests.support.attacks import careless_server
from tests.support.device import Device
from tests.support.fleet import PROGRAM, Fleet, free_port, until
from tests.support.paths import ROOT
from tests.support.refusals import refused
from tests.support.scraping import get

REQUIRED = {"round__required_features": '["measures"]'}


def upgraded(fleet: Fleet, name: str) -> Device:
    """Return a client that has every feature, and has joined."""
    device = Device(fleet.address, name)
    device.join(features=FEATURES, software="fairfleet 99.0", train_samples=5, test_samples=5)
    return device


def outdated(fleet: Fleet, name: str) -> Device:
    """Return a client without the fields of newer versions, which has joined."""
    device = Device(fleet.address, name)
    device.join(train_samples=5, test_samples=5)
    return device


def deliver(*devices: Device) -> None:
    """Let these clients train and send an update, each to the same round."""
    for device in devices:
        device.train_task()
    for device in devices:
        chunks, encoded = device.encode()
        device.send(device.open(encoded).upload, chunks)


def clients(fleet: Fleet) -> dict[str, dict[str, Any]]:
    """Return the records of `fairfleet clients --json`, by client."""
    done = fleet.run("clients", "--server", fleet.address, "--json")
    assert done.returncode == 0, done.stderr
    records = [json.loads(line) for line in done.stdout.splitlines()]
    return {record["client"]: record for record in records}


def test_a_client_without_a_required_feature_stays_while_the_rounds_of_others_go_on(
    fleet: Fleet,
) -> None:
    fleet.init()
    fleet.start_server(round__evaluate_every=1, **REQUIRED)
    old, ann = outdated(fleet, "old"), upgraded(fleet, "ann")
    assert fleet.status().missing == 1  # it is not counted towards round.minimum_clients
    bob = upgraded(fleet, "bob")
    deliver(ann, bob)
    assert ann.task.required_features == ["measures"]
    for device in (ann, bob):
        task = device.next_task().evaluate
        assert task.required_features == ["measures"]
        request = pb.ReportEvaluationRequest(
            session=device.session, version=1, evaluation=pb.Evaluation(samples=5, loss=1.0)
        )
        device.stub.ReportEvaluation(request, timeout=10)
    deliver(ann, bob)
    assert fleet.selections()[0] == {"ann", "bob"}
    shown = clients(fleet)
    assert shown["old"]["missing_features"] == ["measures"]
    assert shown["old"]["state"] == "idle"
    assert "lacks measures, required to train" in shown["old"]["not_selected_because"]
    assert "not_selected_because" not in shown["ann"]
    recorded = fleet.query("select failure from evaluations where client = 'old'")
    assert "lacks measures" in recorded[0][0]
    old.join()  # again: the reason is in the log once
    assert fleet.log("server.log").count("client old is not selected") == 1


def test_an_operator_sees_the_progress_of_an_upgrade(fleet: Fleet) -> None:
    """The software of a client is shown after it is gone, and after a restart of the server."""
    fleet.init()
    fleet.start_server(**REQUIRED)
    outdated(fleet, "old").leave()
    upgraded(fleet, "new").leave()
    old = outdated(fleet, "old")
    until(lambda: len(fleet.query("select * from clients")) == 2, "the clients to be recorded")
    shown = fleet.run("clients", "--server", fleet.address).stdout
    server = f"fairfleet {version('fairfleet')}"
    assert f"software: 1 with fairfleet 99.0, 1 with unknown; server: {server}" in shown
    assert "old is not selected: its software (unknown) lacks measures" in shown
    assert fleet.status().software == server
    old.leave()
    fleet.kill_server()
    fleet.start_server(**REQUIRED)
    assert clients(fleet)["new"] | {"state": "gone"} == {
        "client": "new",
        "state": "gone",
        "software": "fairfleet 99.0",
        "features": sorted(FEATURES),
    }
    upgraded(fleet, "old")
    until(lambda: clients(fleet)["old"]["software"] == "fairfleet 99.0", "the upgrade")


def test_a_client_that_returns_without_a_feature_is_replaced_in_its_round(fleet: Fleet) -> None:
    """A device can go back to older software between its selection and its restart."""
    fleet.init()
    fleet.start_server(rounds=1, **REQUIRED)
    ann, bob = upgraded(fleet, "ann"), upgraded(fleet, "bob")
    ann.train_task()
    bob.train_task()
    bob.join()
    cat = upgraded(fleet, "cat")
    deliver(ann)
    deliver(cat)
    fleet.wait_for_version(1)
    assert {part["client"] for part in fleet.records()[0]["contributions"]} == {"ann", "cat"}


def test_the_server_answers_with_its_version_and_features(fleet: Fleet) -> None:
    fleet.init()
    fleet.start_server()
    joined = Device(fleet.address, "future").join(protocol_version=9, oldest_protocol_version=1)
    assert joined.protocol_version == 1
    assert joined.federation_id == fleet.status().federation_id != ""
    with refused(grpc.StatusCode.FAILED_PRECONDITION, "version 3 to 9", "server speaks 1"):
        Device(fleet.address, "future").join(protocol_version=9, oldest_protocol_version=3)


def test_a_client_process_says_what_it_is(fleet: Fleet) -> None:
    fleet.init()
    fleet.start_server(round__minimum_clients=2)
    fleet.start_client("lonely")
    until(lambda: fleet.status().connected, "the client to join")
    shown = clients(fleet)["lonely"]
    assert shown["software"] == f"fairfleet {version('fairfleet')}"
    assert shown.get("features", []) == sorted(CLIENT_FEATURES)


def test_the_page_shows_who_is_not_selected(fleet: Fleet) -> None:
    fleet.init()
    port = free_port()
    fleet.start_server(**REQUIRED, http__port=port)
    outdated(fleet, "old")

    def reason() -> str:
        state = json.loads(get(f"http://127.0.0.1:{port}/api/state")[1])
        return str({row["client"]: row for row in state["clients"]}["old"]["not_selected_because"])

    assert "lacks measures" in until(reason, "the reason")


def test_a_client_declines_a_task_that_requires_a_feature_it_does_not_have(fleet: Fleet) -> None:
    """No server of ours sends such a task; a client must not train something else then."""
    fleet.init()
    fleet.program = [sys.executable, "-m", careless_server.__name__]
    fleet.environment = {"PYTHONPATH": str(ROOT)}
    fleet.start_server(round__minimum_clients=1, round__evaluate_every=1)
    fleet.program, fleet.environment = PROGRAM, {}
    client = fleet.start_client("device")
    refusal = f"lacks {careless_server.FEATURE}; install a newer fairfleet"
    until(
        lambda: (
            f"cannot do train/0/0/device: this client (fairfleet {version('fairfleet')}) "
            f"{refusal}" in fleet.log("server.log")
        ),
        "the refusal",
    )
    assert refusal in fleet.log("device.log")
    assert client.poll() is None
    assert fleet.query("select * from updates") == []


def test_a_client_cannot_break_the_table_by_what_it_says_of_itself(fleet: Fleet) -> None:
    fleet.init()
    fleet.start_server()
    Device(fleet.address, "odd").join(device="[/y]", software="[/x]\x1b]0;evil")
    Device(fleet.address, "other").join(device="[bold]", software="fairfleet 1")
    done = fleet.run("clients", "--server", fleet.address)
    assert done.returncode == 0, done.stderr
    assert all(text in done.stdout for text in ("[/y]", "[/x]?]0;evil", "[bold]"))
