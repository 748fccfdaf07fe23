"""A member can use only its own role, name, session and uploads, while its certificate is valid."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import grpc
import pytest

from fairfleet.proto.v1 import fleet_pb2 as pb
from fairfleet.server.rpc.authorization import TABLE
from tests.support.calls import every_call
from tests.support.device import REPORT
from tests.support.refusals import refused
from tests.support.secure import SecureFleet, client, operator

Code = grpc.StatusCode


def test_a_client_cannot_join_under_another_name(standing: SecureFleet) -> None:
    for name in ("honest-1", "operator", "ANN"):
        with refused(
            Code.PERMISSION_DENIED, "client ann cannot speak for another", f"join as {name}"
        ):
            standing.device("ann").join(client=name)


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
        "ReportVerification": pb.ReportVerificationRequest(
            session=session, failure="none of yours"
        ),
        "Heartbeat": pb.HeartbeatRequest(session=session, task="train/0/0/ann", failure="gives up"),
        "Leave": pb.LeaveRequest(session=session),
        "FetchModel": pb.FetchModelRequest(session=session),
    }
    with_session = {m.name for m in pb.DESCRIPTOR.services_by_name["Fleet"].methods} - {
        "Join",
        "SendUpload",
    }
    assert with_session == set(calls)
    for method, request in calls.items():
        with refused(
            Code.PERMISSION_DENIED,
            "client thief cannot speak for another",
            "session is another client's",
        ):
            answer = getattr(thief.stub, method)(request, timeout=10)
            list(answer if method in ("FetchModel", "TakeTask") else ())
    announced = pb.OpenUploadRequest(session=session, report=REPORT).SerializeToString()
    with refused(Code.PERMISSION_DENIED, "session is another client's"):
        thief.open_and_send(announced, [])
    assert own.status().connected == 2
    ann.train_task()  # its session still works


@pytest.mark.slow
def test_a_client_can_neither_send_to_the_upload_of_another_nor_replay_it(own: SecureFleet) -> None:
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
        with refused(code, "not open"):  # a replay has no open upload to write to
            sender.send(upload, chunks)
    assert ann.open(encoded).receipt == first
    assert own.query("select count(*) from updates where client = 'ann'") == [(1,)]


def test_every_role_can_call_exactly_what_the_table_allows(own: SecureFleet) -> None:
    """Every message is empty: the table decides before a request is examined."""
    own.init()
    own.start_server()
    channels = {
        # The name "operator" gives a client no rights.
        "client": own.channel_of(own.credentials(client("operator"))),
        "operator": own.channel_of(own.credentials(operator("ann"))),
        "nobody": own.enrolment_channel(),
    }
    allowed = {
        role: {method for method in every_call() if call_freely(channels[role], method)}
        for role in channels
    }
    for role, methods in allowed.items():
        assert methods == {method for method in every_call() if role in TABLE[method]}, role
    with refused(Code.UNIMPLEMENTED):
        channels["client"].unary_unary("/fairfleet.v1.Fleet/Anything")(b"", timeout=10)


def call_freely(channel: grpc.Channel, method: str) -> bool:
    """Return whether a call gets any answer but a refusal because of the caller's role.

    gRPC first sends an empty message, which is ignored.
    """
    call = channel.stream_stream(method)(iter([b""]), timeout=2)
    try:
        next(filter(None, call), None)
    except grpc.RpcError as error:
        if error.code() is Code.PERMISSION_DENIED and "needs a certificate of" in error.details():
            return False
        # A method of the health service that its library does not implement was called as well.
        return error.details() != "Method not found!"
    finally:
        call.cancel()
    return True


@pytest.mark.slow
def test_an_expired_certificate_is_refused_on_an_open_connection(standing: SecureFleet) -> None:
    ann = standing.device("short-lived", ttl=timedelta(seconds=4))
    ann.join()
    with refused(Code.PERMISSION_DENIED, "the certificate of client short-lived expired on"):
        for _ in range(1000):
            ann.stub.Heartbeat(pb.HeartbeatRequest(session=ann.session), timeout=10)
            time.sleep(0.05)
