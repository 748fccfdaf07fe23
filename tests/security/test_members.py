"""A member keeps to its own business: its role, its name, its session, its uploads, its time."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import grpc
import pytest

from fairfleet.proto.v1 import fleet_pb2 as pb
from fairfleet.server.authorization import TABLE
from tests.e2e.device import REPORT
from tests.e2e.secure import SecureFleet, client, operator
from tests.e2e.test_refusals import refused
from tests.server.test_authorization import every_call

Code = grpc.StatusCode


def test_a_client_cannot_join_under_another_name(standing: SecureFleet) -> None:
    for other in ("honest-1", "operator", "ANN"):
        with refused(Code.PERMISSION_DENIED, "client ann cannot speak for another", f"join as {other}"):
            standing.device("ann").join(client=other)


def test_a_client_cannot_use_anothers_session(own: SecureFleet) -> None:
    own.init()
    own.start_server()
    ann, thief = own.device("ann"), own.device("thief")
    session = ann.join().session
    thief.join()
    calls: dict[str, Any] = {
        "NextTask": pb.NextTaskRequest(session=session),
        "TakeTask": pb.TakeTaskRequest(session=session),
        "OpenUpload": pb.OpenUploadRequest(session=session, report=REPORT),
        "ReportEvaluation": pb.ReportEvaluationRequest(session=session, failure="none of yours"),
        "ReportVerification": pb.ReportVerificationRequest(session=session, failure="none of yours"),
        "Heartbeat": pb.HeartbeatRequest(session=session, task="train/0/0/ann", failure="gives up"),
        "Leave": pb.LeaveRequest(session=session),
        "FetchModel": pb.FetchModelRequest(session=session),
    }
    with_session = {m.name for m in pb.DESCRIPTOR.services_by_name["Fleet"].methods} - {"Join", "SendUpload"}
    assert with_session == set(calls)
    for method, request in calls.items():
        with refused(Code.PERMISSION_DENIED, "client thief cannot speak for another", "session is another client's"):
            answer = getattr(thief.stub, method)(request, timeout=10)
            list(answer if method in ("FetchModel", "TakeTask") else ())
    announced = pb.OpenUploadRequest(session=session, report=REPORT).SerializeToString()
    with refused(Code.PERMISSION_DENIED, "session is another client's"):
        thief.open_and_send(announced, [])
    assert own.status().connected == 2
    ann.train_task()  # its session was not touched


@pytest.mark.slow
def test_a_client_cannot_send_into_anothers_upload_nor_send_it_again(own: SecureFleet) -> None:
    own.init(600_000)
    own.start_server(rounds=2)
    ann, thief = own.device("ann"), own.device("thief")
    ann.join()
    thief.join()
    ann.train_task()
    thief.train_task()
    chunks, encoded = ann.encode()
    upload = ann.open(encoded).upload
    with refused(Code.PERMISSION_DENIED, "the upload is another client's"):
        thief.send(upload, chunks)
    first = ann.send(upload, chunks)
    assert first.outcome == pb.OUTCOME_COUNTED
    for sender, code in ((thief, Code.FAILED_PRECONDITION), (ann, Code.FAILED_PRECONDITION)):
        with refused(code, "not open"):  # a replay finds nothing to write to, whoever sends it
            sender.send(upload, chunks)
    assert ann.open(encoded).receipt == first
    assert own.query("select count(*) from updates where client = 'ann'") == [(1,)]


def test_every_call_by_every_role(own: SecureFleet) -> None:
    """With an empty message each: the table decides before anything is looked at."""
    own.init()
    own.start_server()
    channels = {
        "client": own.channel_of(own.credentials(client("operator"))),  # whose name gives it no right
        "operator": own.channel_of(own.credentials(operator("ann"))),
        "nobody": own.enrolment_channel(),
    }
    allowed = {role: {method for method in every_call() if call_freely(channels[role], method)} for role in channels}
    for role, found in allowed.items():
        assert found == {method for method in every_call() if role in TABLE[method]}, role
    with refused(Code.UNIMPLEMENTED):
        channels["client"].unary_unary("/fairfleet.v1.Fleet/Anything")(b"", timeout=10)


def call_freely(channel: grpc.Channel, method: str) -> bool:
    """Whether anything but a refusal for one's role comes. (Before that gRPC sends an empty message, to be ignored.)"""
    call = channel.stream_stream(method)(iter([b""]), timeout=2)
    try:
        next(filter(None, call), None)
    except grpc.RpcError as error:
        if error.code() is Code.PERMISSION_DENIED and "needs a certificate of" in error.details():
            return False
        return error.code() is not Code.UNIMPLEMENTED
    finally:
        call.cancel()
    return True


def test_a_certificate_that_ends_is_refused_on_an_open_connection(standing: SecureFleet) -> None:
    ann = standing.device("short-lived", ttl=timedelta(seconds=4))
    ann.join()
    with refused(Code.PERMISSION_DENIED, "the certificate of client short-lived ended on"):
        for _ in range(1000):
            ann.stub.Heartbeat(pb.HeartbeatRequest(session=ann.session), timeout=10)
            time.sleep(0.05)
