"""Requests for tasks and models, and answers to tasks that were not given."""

from __future__ import annotations

from typing import Any

import grpc
import pytest

from fairfleet.proto.v1 import fleet_pb2 as pb
from tests.support.device import Device
from tests.support.fleet import Fleet
from tests.support.refusals import refused

Code = grpc.StatusCode


def test_the_same_task_is_returned_until_it_is_done(device: Device) -> None:
    assert device.next_task().train.id == device.task.id
    assert device.next_task().train.plan == device.task.plan


def test_an_unpublished_version_is_refused(device: Device) -> None:
    request = pb.FetchModelRequest(session=device.session, version=device.task.model.version + 5)
    with refused(Code.NOT_FOUND, "is not published; the newest is"):
        list(device.stub.FetchModel(request))


def test_a_compact_form_that_does_not_exist_is_refused(device: Device) -> None:
    version = device.task.model.version
    with refused(
        Code.NOT_FOUND, f"version {version} has no compact form; fetch it without `compact`"
    ):
        list(
            device.stub.FetchModel(
                pb.FetchModelRequest(session=device.session, version=version, compact=True)
            )
        )
    with refused(Code.NOT_FOUND, "is not published; the newest is"):
        list(
            device.stub.FetchModel(
                pb.FetchModelRequest(session=device.session, version=version + 5, compact=True)
            )
        )


def test_a_heartbeat_with_an_invented_task_is_refused(device: Device) -> None:
    for task in (
        "invented",
        "train/0/0/honest",
        f"train/x/0/{device.name}",
        f"{device.task.id}x",
        "x" * 100_000,
    ):
        with refused(Code.INVALID_ARGUMENT, f"is none of client {device.name}", "from NextTask"):
            device.stub.Heartbeat(pb.HeartbeatRequest(session=device.session, task=task))
        with refused(Code.INVALID_ARGUMENT, f"is none of client {device.name}"):
            device.stub.Heartbeat(
                pb.HeartbeatRequest(session=device.session, task=task, failure="cannot")
            )
    with refused(Code.INVALID_ARGUMENT, "task is empty; name the task that failed"):
        device.stub.Heartbeat(pb.HeartbeatRequest(session=device.session, failure="cannot"))
    assert not device.stub.Heartbeat(
        pb.HeartbeatRequest(session=device.session, task=device.task.id)
    ).abandon


def test_a_heartbeat_about_an_old_or_unknown_task_is_answered_with_abandon(
    device: Device,
) -> None:
    """The server may have been restarted or restored from a backup; the client takes a new task."""
    for task in (f"train/999999/0/{device.name}", f"verify/0/3/{device.name}"):
        answer = device.stub.Heartbeat(pb.HeartbeatRequest(session=device.session, task=task))
        assert (answer.abandon, answer.reason) == (True, "the round continued without it")
    answer = device.stub.Heartbeat(pb.HeartbeatRequest(session=device.session))
    assert (answer.abandon, answer.reason) == (True, "no task was named")


def test_a_model_can_be_fetched_from_the_start_of_any_chunk_only(device: Device) -> None:
    request = pb.FetchModelRequest(session=device.session, version=device.task.model.version)
    chunks = list(device.stub.FetchModel(request))
    for index, chunk in enumerate(chunks):
        request.offset_bytes = chunk.offset_bytes
        assert list(device.stub.FetchModel(request)) == chunks[index:]
    request.offset_bytes = 1
    with refused(Code.OUT_OF_RANGE, "byte 1 is not the beginning of a chunk"):
        list(device.stub.FetchModel(request))


@pytest.mark.parametrize("number", [2**63 - 1, 2**63, 2**64 - 1])
def test_round_numbers_beyond_the_database_are_refused_and_the_server_survives(
    device: Device, shared_fleet: Fleet, number: int
) -> None:
    tried = pb.ReportVerificationRequest(
        session=device.session, round=number, step_digest=bytes(32), losses=[1.0]
    )
    scores = pb.Evaluation(samples=1, loss=1.0)
    evaluated = pb.ReportEvaluationRequest(
        session=device.session, version=number, evaluation=scores
    )
    for call in (
        lambda: device.stub.ReportVerification(tried, timeout=10),
        lambda: device.stub.ReportEvaluation(evaluated, timeout=10),
        lambda: device.open(device.encode()[1], round=number),
        lambda: list(
            device.stub.FetchModel(
                pb.FetchModelRequest(session=device.session, version=number), timeout=10
            )
        ),
    ):
        with pytest.raises(grpc.RpcError) as caught:
            call()
        error: Any = caught.value
        assert error.code() in (grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.NOT_FOUND), (
            error.details()
        )
    assert shared_fleet.server is not None
    assert shared_fleet.server.poll() is None


def test_an_evaluation_out_of_range_is_refused(device: Device) -> None:
    request = pb.ReportEvaluationRequest(session=device.session, version=0)
    request.evaluation.MergeFrom(pb.Evaluation(samples=1, loss=1.0, accuracy=1.5))
    with refused(Code.INVALID_ARGUMENT, "accuracy"):
        device.stub.ReportEvaluation(request)


def test_an_evaluation_without_result_or_failure_is_refused(device: Device) -> None:
    with refused(Code.INVALID_ARGUMENT, "evaluation and failure are both missing"):
        device.stub.ReportEvaluation(pb.ReportEvaluationRequest(session=device.session, version=0))


def test_an_unrequested_evaluation_is_refused(device: Device) -> None:
    request = pb.ReportEvaluationRequest(session=device.session, version=device.task.round)
    request.evaluation.MergeFrom(pb.Evaluation(samples=1, loss=1.0))
    with refused(Code.FAILED_PRECONDITION, "was not selected to evaluate"):
        device.stub.ReportEvaluation(request)


def test_an_unrequested_verification_is_refused(device: Device) -> None:
    request = pb.ReportVerificationRequest(
        session=device.session, round=device.task.round, losses=[1.0]
    )
    with refused(Code.FAILED_PRECONDITION, "was not selected to verify"):
        device.stub.ReportVerification(request)
