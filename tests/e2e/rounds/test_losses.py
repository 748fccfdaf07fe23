"""How losses are measured in a federation: only as exactly as something needs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from fairfleet.common.tensors import Model
from fairfleet.proto.v1 import fleet_pb2 as pb
from tests.support.device import REPORT, Device
from tests.support.fleet import Fleet
from tests.support.refusals import refused


def measured(fleet: Fleet, tmp_path: Path, **settings: Any) -> set[str]:
    """Run a round of two clients, and return how they measured their losses."""
    log = tmp_path / "losses"
    fleet.init(task="softmax")
    fleet.start_server(rounds=1, round__evaluate_every=0, **settings)
    for name in ("ann", "bob"):
        fleet.start_client(name, task="softmax", loss_log=str(log), samples=3000)
    fleet.wait_for_version(1)
    return set(log.read_text().splitlines())


@pytest.mark.parametrize(
    ("settings", "kind"),
    [
        pytest.param({"rule": "{name: fedavg}"}, "batches", id="nothing reads losses"),
        pytest.param({"rule": "{name: adafed}"}, "exact", id="the rule reads them"),
        pytest.param({"losses__before": "exact"}, "exact", id="the operator wants them"),
        pytest.param(
            {"rule": "{name: adafed}", "losses__before": "sampled", "losses__samples": 100},
            "sampled",
            id="the operator accepts a sample",
        ),
    ],
)
def test_losses_are_measured_as_the_rule_and_the_settings_need(
    fleet: Fleet, tmp_path: Path, settings: dict[str, Any], kind: str
) -> None:
    assert measured(fleet, tmp_path, **settings) == {f"{kind} None"}
    reports = [part["report"] for part in fleet.records()[0]["contributions"]]
    assert {report["loss_measurement"] for report in reports} == {kind}
    assert all(
        (report["loss_standard_error"] is not None) == (kind == "sampled") for report in reports
    )
    shown = json.loads(fleet.run("rounds", "--server", fleet.address, "--json").stdout)
    assert shown["training_loss"]["measurement"] == kind


def test_a_task_of_an_older_client_gets_both_losses_in_the_plan_that_it_ignores(
    fleet: Fleet,
) -> None:
    fleet.init()
    fleet.start_server(rounds=1, round__minimum_clients=1)
    device = Device(fleet.address, "old")
    device.join()
    plan = device.train_task().plan
    assert plan.loss_before == pb.LOSS_MEASUREMENT_BATCHES
    assert plan.loss_after == pb.LOSS_MEASUREMENT_NONE
    chunks, encoded = device.encode()
    device.send(device.open(encoded).upload, chunks)  # its report says nothing of measurements
    fleet.wait_for_version(1)
    report = fleet.records()[0]["contributions"][0]["report"]
    assert (report["loss_measurement"], report["loss_after"]) == ("exact", 0.5)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"loss_measurement": pb.LOSS_MEASUREMENT_BATCHES}, "need a loss that is exact"),
        ({"loss_measurement": pb.LOSS_MEASUREMENT_SAMPLED}, "need a loss that is exact"),
        ({"loss_measurement": 77}, "loss_measurement"),
        ({"loss_standard_error": -1.0}, "loss_standard_error"),
        ({"loss_standard_error": float("nan")}, "loss_standard_error"),
        ({"loss_standard_error": 1e300}, "loss_standard_error"),
    ],
)
def test_a_loss_that_the_rule_cannot_use_is_refused_by_name(
    fleet: Fleet, fields: dict[str, Any], words: str
) -> None:
    fleet.init()
    fleet.start_server(round__minimum_clients=1, rule="{name: adafed}")
    device = Device(fleet.address, "ann")
    device.join()
    assert device.train_task().plan.loss_before == pb.LOSS_MEASUREMENT_EXACT
    _, encoded = device.encode()
    report = pb.TrainReport()
    report.CopyFrom(REPORT)
    report.MergeFrom(pb.TrainReport(**fields))
    with refused(grpc.StatusCode.INVALID_ARGUMENT, words):
        device.open(encoded, report=report)


def test_a_loss_after_training_may_be_missing_although_it_is_wanted(fleet: Fleet) -> None:
    fleet.init()
    fleet.start_server(rounds=1, round__minimum_clients=1, losses__after="exact")
    device = Device(fleet.address, "ann")
    device.join()
    assert device.train_task().plan.loss_after == pb.LOSS_MEASUREMENT_EXACT
    chunks, encoded = device.encode()
    report = pb.TrainReport(samples=10, loss_before=1.0, steps=1, learning_rate=0.1)
    device.send(device.open(encoded, report=report).upload, chunks)
    fleet.wait_for_version(1)
    assert fleet.records()[0]["contributions"][0]["report"]["loss_after"] is None


def model_by(fleet: Fleet, losses: dict[str, dict[str, float]], rule_loss: str) -> Model:
    """Run one round of AdaFed with these losses, and return the model that it makes."""
    fleet.init(size=1)  # and three more parameters, the bias
    fleet.start_server(
        rounds=1,
        round__minimum_clients=len(losses),
        round__evaluate_every=0,
        rule="{name: adafed}",
        losses__rule=rule_loss,
    )
    updates = {"ann": [1.0, 0.0, 0.0, 0.0], "bob": [0.0, 2.0, 0.0, 0.0]}
    devices = {name: Device(fleet.address, name) for name in losses}
    for device in devices.values():
        device.join()
    for name, device in devices.items():
        task = device.train_task()
        if rule_loss == "after":
            assert task.plan.loss_after == pb.LOSS_MEASUREMENT_EXACT
            assert "loss_after" in task.report_fields
        chunks, encoded = device.encode(updates[name])
        report = pb.TrainReport(samples=10, steps=1, learning_rate=0.1, **losses[name])
        device.send(device.open(encoded, report=report).upload, chunks)
    fleet.wait_for_version(1)
    return fleet.model(1)


def test_a_rule_may_receive_the_loss_after_training_as_adafeds_algorithm_does(
    tmp_path: Path,
) -> None:
    values = {"ann": (2.0, 0.1), "bob": (0.5, 3.0)}
    as_sent = {name: {"loss_before": b, "loss_after": a} for name, (b, a) in values.items()}
    exchanged = {name: {"loss_before": a, "loss_after": b} for name, (b, a) in values.items()}
    models = list[Model]()
    for rule_loss, losses in (("after", as_sent), ("before", exchanged), ("before", as_sent)):
        folder = tmp_path / str(len(models))
        folder.mkdir()
        fleet = Fleet(folder)
        try:
            models.append(model_by(fleet, losses, rule_loss))
        finally:
            fleet.end()
    after, expected, before = (model.parameters for model in models)
    np.testing.assert_array_equal(after, expected)
    assert np.abs(after - before).max() > 1e-3


def test_a_missing_loss_after_training_is_refused_if_the_rule_receives_it(fleet: Fleet) -> None:
    """Read as 0 it would be the best of all losses."""
    fleet.init()
    fleet.start_server(round__minimum_clients=1, rule="{name: adafed}", losses__rule="after")
    device = Device(fleet.address, "ann")
    device.join()
    device.train_task()
    _, encoded = device.encode()
    report = pb.TrainReport(samples=10, loss_before=1.0, steps=1, learning_rate=0.1)
    with refused(grpc.StatusCode.INVALID_ARGUMENT, "loss_after is missing"):
        device.open(encoded, report=report)


def test_losses_that_were_not_measured_exactly_are_not_compared(fleet: Fleet) -> None:
    """Whether a loss fell can be said of exact losses only."""
    fleet.init()
    fleet.start_server(rounds=3, round__minimum_clients=2, round__evaluate_every=0)
    ann, bob = (Device(fleet.address, name) for name in ("ann", "bob"))
    for device in (ann, bob):
        device.join()
    for _ in range(3):
        for device, kind in ((ann, pb.LOSS_MEASUREMENT_EXACT), (bob, pb.LOSS_MEASUREMENT_BATCHES)):
            device.train_task()
            chunks, encoded = device.encode()
            report = pb.TrainReport()
            report.CopyFrom(REPORT)
            report.loss_measurement = kind
            device.send(device.open(encoded, report=report).upload, chunks)
    fleet.wait_for_version(3)
    assert fleet.query("select round, clients from measures order by round") == [(0, 1), (1, 1)]


def test_an_exact_loss_that_does_not_fit_into_the_time_of_a_client_fails_and_says_so(
    fleet: Fleet,
) -> None:
    """A pass keeps to --max-seconds. The client ends after three failures, with the reason."""
    fleet.init(task="softmax")
    fleet.start_server(round__minimum_clients=1, round__deadline_seconds=0.2, rule="{name: adafed}")
    ann = fleet.start_client("ann", "--max-seconds", "1e-9", task="softmax", samples=20_000)
    assert ann.wait(60) != 0
    log = fleet.log("ann.log")
    assert "8192 of 20000 samples were measured" in log
    assert "Give a larger --max-seconds" in log


def test_a_client_without_time_to_measure_takes_part_where_no_loss_is_needed(fleet: Fleet) -> None:
    fleet.init(task="softmax")
    fleet.start_server(rounds=1, round__minimum_clients=1, round__evaluate_every=0)
    fleet.start_client("ann", "--max-seconds", "1e-9", task="softmax", samples=20_000)
    fleet.wait_for_version(1)
    report = fleet.records()[0]["contributions"][0]["report"]
    assert (report["steps"], report["loss_measurement"]) == (1, "batches")
    assert report["cut_by"] == ["seconds"]
