"""Announcements of updates that the server refuses, with the reason."""

from __future__ import annotations

import grpc
import pytest

from fairfleet.proto.v1 import fleet_pb2 as pb
from fairfleet.proto.v1 import operator_pb2
from tests.support.device import REPORT, Device
from tests.support.fleet import Fleet
from tests.support.refusals import refused

Code = grpc.StatusCode


def test_unrequested_noise_does_not_excuse_an_update_without_steps(device: Device) -> None:
    report = pb.TrainReport(samples=10, loss_before=1.0, loss_after=0.5, steps=0, learning_rate=0.1)
    chunks, encoded = device.encode()
    opened = device.open(encoded, report=report, privacy=pb.Privacy(clip=1.0, noise_multiplier=1.0))
    with pytest.raises(grpc.RpcError, match="steps is 0"):
        device.send(opened.upload, chunks)


def test_an_update_for_an_unknown_round_is_refused(device: Device) -> None:
    _, encoded = device.encode()
    with refused(Code.FAILED_PRECONDITION, "round 1000000 is not known"):
        device.open(encoded, round=999_999)


def test_an_update_computed_on_another_model_is_refused(device: Device) -> None:
    _, encoded = device.encode()
    with refused(Code.FAILED_PRECONDITION, "was computed on model", "Request a new task"):
        device.open(encoded, model_digest=bytes(32))


def test_an_update_of_a_client_that_was_not_selected_is_refused(
    device: Device, shared_fleet: Fleet
) -> None:
    guest = Device(shared_fleet.address, "guest")
    guest.join()
    guest.task = device.task
    _, encoded = guest.encode()
    with refused(Code.FAILED_PRECONDITION, "client guest was not selected to train"):
        guest.open(encoded)
    guest.leave()


def test_a_late_update_gets_a_receipt_with_the_reason_it_is_ignored(
    device: Device, shared_fleet: Fleet
) -> None:
    operator = shared_fleet.operator()
    assert device.task.round > 0, "an earlier test committed a round"
    _, encoded = device.encode()
    receipt = device.open(encoded, round=device.task.round - 1).receipt
    assert receipt.outcome in (pb.OUTCOME_IGNORED, pb.OUTCOME_COUNTED)
    late = Device(shared_fleet.address, "latecomer")
    late.join()
    late.task = device.task
    receipt = late.open(encoded, round=0).receipt
    assert receipt.outcome == pb.OUTCOME_IGNORED
    assert "round 1 continued without latecomer" in receipt.reason
    late.leave()
    assert operator.Status(operator_pb2.StatusRequest()).version == device.task.round


def test_a_declared_size_over_the_limit_is_refused(device: Device) -> None:
    _, encoded = device.encode()
    with refused(Code.RESOURCE_EXHAUSTED, "declared 1000000000000 bytes", "limits.upload_bytes"):
        device.open(encoded, size_bytes=10**12)


def test_an_unknown_codec_is_refused(device: Device) -> None:
    _, encoded = device.encode()
    with refused(Code.INVALID_ARGUMENT, "unknown codec", "raw32"):
        device.open(encoded, codec="zip")


def test_a_digest_of_the_wrong_length_is_refused(device: Device) -> None:
    _, encoded = device.encode()
    with refused(Code.INVALID_ARGUMENT, "32 bytes; found 3"):
        device.open(encoded, digest=b"abc")


@pytest.mark.parametrize(
    ("field", "value"),
    [("loss_before", float("nan")), ("loss_after", float("inf")), ("learning_rate", -1.0)],
)
def test_a_report_with_an_unusable_value_is_refused(
    device: Device, field: str, value: float
) -> None:
    _, encoded = device.encode()
    report = pb.TrainReport()
    report.CopyFrom(REPORT)
    setattr(report, field, value)
    with refused(Code.INVALID_ARGUMENT, "the training report is not usable", field):
        device.open(encoded, report=report)


def test_an_announcement_without_a_report_or_a_size_is_refused(device: Device) -> None:
    _, encoded = device.encode()
    with refused(Code.INVALID_ARGUMENT, "report is missing"):
        device.open(encoded, report=None)
    with refused(Code.INVALID_ARGUMENT, "size_bytes is 0"):
        device.open(encoded, size_bytes=0)


@pytest.mark.parametrize(
    ("field", "value"),
    [("samples", 0), ("loss_before", 1.7e308), ("learning_rate", 1e30), ("seconds", 1e300)],
)
def test_a_report_out_of_range_is_refused(device: Device, field: str, value: float) -> None:
    report = pb.TrainReport()
    report.CopyFrom(REPORT)
    setattr(report, field, value)
    with refused(Code.INVALID_ARGUMENT, field, "expected a value from"):
        device.open(device.encode()[1], report=report)


def test_an_update_without_steps_is_refused(device: Device) -> None:
    report = pb.TrainReport()
    report.CopyFrom(REPORT)
    report.steps = 0
    chunks, encoded = device.encode()
    with refused(Code.INVALID_ARGUMENT, "steps is 0"):
        device.send(device.open(encoded, report=report).upload, chunks)
