"""No client's report or update ends the server or the round, and all concerned learn why."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from fairfleet.common.tensors import Model
from fairfleet.proto.v1 import fleet_pb2 as pb
from tests.support.device import REPORT, Device
from tests.support.fleet import Fleet, until

HUGE = 3.4e38  # twice this value exceeds float32


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    fleet = Fleet(tmp_path)
    fleet.init(20)
    yield fleet
    fleet.end()


def devices(fleet: Fleet, *names: str) -> list[Device]:
    joined = [Device(fleet.address, name) for name in names]
    for device in joined:
        device.join(verifies=True)
    return joined


def refusal(call: Any) -> str:
    with pytest.raises(grpc.RpcError) as caught:
        call()
    error: Any = caught.value
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT, error.details()
    return str(error.details())


def train(device: Device, value: float = 1.0, report: pb.TrainReport = REPORT) -> pb.Receipt:
    chunks, encoded = device.encode(value)
    return device.send(device.open(encoded, report=report).upload, chunks)


def with_norm() -> pb.TrainReport:
    report = pb.TrainReport(gradient_norm=1.0)
    report.MergeFrom(REPORT)
    return report


def test_an_incomplete_report_is_refused_on_both_paths_and_the_round_continues(
    fleet: Fleet,
) -> None:
    fleet.start_server(
        rule__name="adafedadam",
        rule__reference="first",
        rounds=100,
        round__quorum=0.5,
        round__deadline_seconds=2,
    )
    honest, lacking = devices(fleet, "honest", "lacking")
    task = lacking.train_task()
    assert list(task.report_fields) == ["gradient_norm", "learning_rate"]
    chunks, encoded = lacking.encode()
    announced = lacking.announcement(encoded).SerializeToString()
    assert "gradient_norm is missing" in refusal(lambda: lacking.open(encoded))
    assert "gradient_norm is missing" in refusal(lambda: lacking.open_and_send(announced, chunks))
    for report, field in (
        (pb.TrainReport(learning_rate=0.0), "learning_rate"),
        (pb.TrainReport(gradient_norm=1.7e308), "gradient_norm"),
        (pb.TrainReport(loss_before=-1.7e308), "loss_before"),
    ):
        full = with_norm()
        for changed, _ in report.ListFields() or [
            (pb.TrainReport.DESCRIPTOR.fields_by_name[field], 0)
        ]:
            setattr(full, changed.name, getattr(report, changed.name))
        assert field in refusal(lambda full=full: lacking.open(encoded, report=full))
    honest.train_task()
    assert train(honest, report=with_norm()).outcome == pb.OUTCOME_COUNTED
    fleet.wait_for_version(1)
    assert fleet.server is not None
    assert fleet.server.poll() is None


def test_a_task_with_an_incomplete_report_misses_the_round_and_keeps_running(
    fleet: Fleet,
) -> None:
    """The task ignores the request for a gradient norm, as a user's task may."""
    fleet.start_server(
        rule__name="adafedadam", rule__reference="first", rounds=100, round__minimum_clients=1
    )
    client = fleet.start_client("forgetful")
    until(
        lambda: "which this federation's rule needs" in fleet.log("forgetful.log"),
        "the client's log",
    )
    assert client.poll() is None
    assert "gradient_norm" in fleet.log("forgetful.log")
    assert fleet.server is not None
    assert fleet.server.poll() is None
    assert fleet.version() == 0


def test_an_update_that_breaks_aggregation_is_quarantined_and_its_client_informed(
    fleet: Fleet,
) -> None:
    settings: dict[str, Any] = {"rounds": 100, "round__minimum_clients": 3, "round__quorum": 1.0}
    fleet.start_server(**settings)
    honest, other, hostile = devices(fleet, "honest", "other", "hostile")
    for number in range(8):  # each mean of a round is finite, until the model exceeds float32
        for device in (honest, other, hostile):
            device.train_task()
            receipt = train(device, HUGE if device is hostile else 1.0)
            assert receipt.outcome == pb.OUTCOME_COUNTED
        fleet.wait_for_version(number + 1)
        check_models(fleet)
        if rows := fleet.query("select round, client, reason, file from quarantine"):
            break
    assert [row[:2] for row in rows] == [(number, "hostile")]
    assert "not finite" in rows[0][2]
    assert (fleet.state / rows[0][3]).is_file()
    notice = hostile.next_task().quarantined
    assert (notice.round, "not finite" in notice.reason) == (number, True)
    assert not honest.next_task().HasField("quarantined")
    record = fleet.records()[-1]
    assert [row["client"] for row in record["admission"] if row["decision"] == "quarantined"] == [
        "hostile"
    ]
    fleet.kill_server()
    fleet.start_server(**settings)
    hostile, _, _ = devices(fleet, "hostile", "honest", "other")
    hostile.train_task()
    assert hostile.next_task().quarantined.round == number  # also known after a restart
    assert (fleet.state / rows[0][3]).is_file()


def check_models(fleet: Fleet) -> None:
    for (file,) in fleet.query("select file from models where file is not null"):
        assert np.isfinite(Model.load(fleet.state / file)[0].parameters).all()


def test_an_overflowing_momentum_is_reset_and_no_honest_client_is_blamed(fleet: Fleet) -> None:
    """One huge update counts once; later only the optimizer's memory of it is too large."""
    settings: dict[str, Any] = {"rounds": 100, "round__minimum_clients": 3, "round__quorum": 0.6}
    settings |= {
        "optimizer__name": "sgd",
        "optimizer__momentum": 0.9,
        "round__deadline_seconds": 10,
    }
    fleet.start_server(**settings)
    honest, other, hostile = devices(fleet, "honest", "other", "hostile")
    for number in range(8):
        for device in (honest, other, hostile):
            device.train_task()
            train(device, HUGE if device is hostile and number == 0 else 0.5)
        fleet.wait_for_version(number + 1)
    check_models(fleet)
    assert fleet.query("select count(*) from quarantine") == [(0,)]
    records = fleet.records()
    assert all(len(record["contributions"]) == 3 for record in records)
    assert any(record["diagnostics"]["notes"].get("state_reset") for record in records)


def test_a_step_that_exceeds_float32_is_not_tried_and_its_client_is_left_out(
    fleet: Fleet,
) -> None:
    fleet.start_server(
        rounds=100,
        round__minimum_clients=3,
        round__quorum=1.0,
        verification__halvings=1,
        verification__threshold=0.1,
    )
    honest, other, hostile = devices(fleet, "honest", "other", "hostile")
    for number in range(6):
        for device in (honest, other, hostile):
            device.train_task()
            train(device, HUGE if device is hostile else 1.0)
        for device in (honest, other, hostile):
            answer_trial(device, number)
        fleet.wait_for_version(number + 1)
    check_models(fleet)
    assert {client for (client,) in fleet.query("select client from quarantine")} == {"hostile"}
    last = fleet.records()[-1]
    assert {part["client"] for part in last["contributions"]} == {"honest", "other"}


def answer_trial(device: Device, number: int) -> None:
    task = device.next_task()
    if task.HasField("verify"):  # a client that was left out tries nothing
        losses = [0.5] * (task.verify.halvings + 1)
        device.stub.ReportVerification(
            pb.ReportVerificationRequest(
                session=device.session,
                round=number,
                step_digest=task.verify.step.digest,
                losses=losses,
            ),
            timeout=10,
        )
