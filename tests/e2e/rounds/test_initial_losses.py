"""AdaFedAdam divides by the loss on the initial model, also of clients that join late."""

from __future__ import annotations

import json
from typing import Any

import grpc
import numpy as np
import pytest

from fairfleet.common.chunk_stream import Decoder
from fairfleet.common.codecs import RAW32
from fairfleet.common.features import FEATURES
from fairfleet.common.tensors import Model
from fairfleet.proto.v1 import fleet_pb2 as pb
from tests.support.device import REPORT, Device
from tests.support.fleet import Fleet, until
from tests.support.refusals import refused

SETTINGS: dict[str, Any] = {
    "rule__name": "adafedadam",
    "rounds": 100,
    "round__minimum_clients": 1,
    "round__evaluate_every": 0,
    "keep_models": 1,  # version 0 stays all the same
}


def joined(fleet: Fleet, name: str, **fields: Any) -> Device:
    device = Device(fleet.address, name)
    device.join(**{"features": FEATURES, "train_samples": 10} | fields)
    return device


def report(**fields: float) -> pb.TrainReport:
    full = pb.TrainReport()
    full.CopyFrom(REPORT)
    full.MergeFrom(pb.TrainReport(gradient_norm=1.0, **fields))
    return full


def deliver(device: Device, **fields: float) -> pb.Receipt:
    chunks, encoded = device.encode()
    return device.send(device.open(encoded, report=report(**fields)).upload, chunks)


def train(device: Device, rounds: int = 1) -> None:
    for _ in range(rounds):
        assert not device.train_task().HasField("initial_model")
        deliver(device)


def initial_model(device: Device) -> Model:
    """Fetch the model of the task's `initial_model`, and check its digest."""
    model, ref = Model.empty(device.model.signature), device.task.initial_model
    decoder = Decoder(model, RAW32)
    request = pb.FetchModelRequest(session=device.session, version=ref.version)
    for chunk in device.stub.FetchModel(request, timeout=10):
        decoder.take(chunk.SerializeToString())
    decoder.finish(ref.digest)
    return model


def stored_report(fleet: Fleet, client: str) -> dict[str, Any]:
    """Return the report of a client's first update."""
    rows = fleet.query(f"select report from updates where client = '{client}' order by round")
    return dict(json.loads(rows[0][0]))


def test_a_late_client_reports_the_loss_of_the_initial_model_once(fleet: Fleet) -> None:
    fleet.init()
    fleet.start_server(**SETTINGS)
    ann = joined(fleet, "ann")
    train(ann, rounds=3)  # with the first, the server knows the loss on version 0
    ann.train_task()
    bob = joined(fleet, "bob")
    deliver(ann)
    train(ann)
    task = bob.train_task()
    assert (task.round, task.initial_model.version) == (4, 0)
    assert "initial_loss" in task.report_fields
    fetched, first = initial_model(bob), fleet.model(0)
    np.testing.assert_array_equal(fetched.parameters, first.parameters)
    _, encoded = bob.encode()
    with refused(grpc.StatusCode.INVALID_ARGUMENT, "initial_loss is missing"):
        bob.open(encoded, report=report())
    assert deliver(bob, initial_loss=8.0).outcome == pb.OUTCOME_COUNTED
    fleet.wait_for_version(5)
    # S = n F / F(0): ann's loss is what it was at first, bob's an eighth of that.
    record = fleet.records()[-1]
    weights = {part["client"]: part["weight"] for part in record["contributions"]}
    assert weights["bob"] / weights["ann"] == pytest.approx(1 / 8)
    assert not bob.train_task().HasField("initial_model")
    fleet.kill_server()
    fleet.start_server(**SETTINGS)
    bob = joined(fleet, "bob")
    assert not bob.train_task().HasField("initial_model")


def test_a_client_process_measures_its_training_loss_on_the_initial_model(fleet: Fleet) -> None:
    fleet.init()
    fleet.start_server(**SETTINGS)
    ann = joined(fleet, "ann")
    train(ann, rounds=2)
    ann.train_task()
    fleet.start_client("late", task="walk", shift=1, size=1000, samples=10)
    until(lambda: fleet.status().connected == 2, "the client to join")
    deliver(ann)
    train(ann)
    until(lambda: fleet.query("select * from updates where client = 'late'"), "its update")
    sent = stored_report(fleet, "late")
    # Its method training_loss returns 0.5 for every model.
    assert (sent["initial_loss"], sent["loss_before"]) == (0.5, 1.0)


@pytest.mark.parametrize("reference", ["first", "none"])
def test_no_client_is_asked_if_losses_are_divided_in_another_way(
    fleet: Fleet, reference: str
) -> None:
    fleet.init()
    fleet.start_server(**SETTINGS, rule__reference=reference)
    ann, old = joined(fleet, "ann"), joined(fleet, "old", features=[])
    train(ann)
    train(ann)
    train(old)
    fleet.wait_for_version(2)


def test_a_client_that_cannot_measure_it_has_the_loss_of_its_first_round(fleet: Fleet) -> None:
    fleet.init()
    fleet.start_server(**SETTINGS)
    ann = joined(fleet, "ann")
    train(ann, rounds=2)
    ann.train_task()
    old = joined(fleet, "old", features=[])
    deliver(ann)
    for number in (3, 4):  # as an older client does, it reports the loss of the received model only
        train(ann)
        task = old.train_task()
        assert (task.round, list(task.required_features)) == (number, [])
        assert not task.HasField("initial_model")
        assert deliver(old, loss_before=2.0 / (number - 2)).outcome == pb.OUTCOME_COUNTED
        fleet.wait_for_version(number + 1)
        parts = fleet.records()[-1]["contributions"]
        weights = {part["client"]: part["weight"] for part in parts}
        assert weights["old"] / weights["ann"] == pytest.approx(1 / (number - 2))


def test_a_server_without_version_0_names_the_rules_other_references(fleet: Fleet) -> None:
    fleet.init()
    fleet.start_server(**SETTINGS)
    train(joined(fleet, "ann"), rounds=2)
    fleet.wait_for_version(2)
    fleet.kill_server()
    (file,) = fleet.query("select file from models where version = 0")[0]
    (fleet.state / file).unlink()
    with pytest.raises(AssertionError):
        fleet.start_server(**SETTINGS)
    log = fleet.log("server.log")
    assert "Rule 'adafedadam' needs the loss of clients on it" in log
    assert "rule.reference=first" in log
    fleet.start_server(**SETTINGS, rule__reference="none")
