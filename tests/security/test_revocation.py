"""A revocation takes effect at once, also for open streams, and is permanent."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from fairfleet.proto.v1 import fleet_pb2 as pb
from fairfleet.proto.v1 import operator_pb2
from fairfleet.proto.v1.operator_pb2_grpc import OperatorStub
from tests.support.device import Device
from tests.support.fleet import Fleet
from tests.support.refusals import refused
from tests.support.secure import SecureFleet, operator

Code = grpc.StatusCode


def in_background(call: Callable[[], Any]) -> Callable[[], Any]:
    """Start a call in a thread; return a function that waits for its answer or error."""
    answers: list[Any] = []

    def run() -> None:
        try:
            answers.append(call())
        except grpc.RpcError as error:
            answers.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()

    def result() -> Any:
        thread.join(30)
        assert answers, "the call does not end"
        if isinstance(answers[0], grpc.RpcError):
            raise answers[0]
        return answers[0]

    return result


def slowly(chunks: list[Any], sent: threading.Event) -> Iterator[Any]:
    """Yield all chunks but the last, which never comes."""
    yield from chunks[:-1]
    sent.set()
    threading.Event().wait(60)


@pytest.mark.parametrize("kind", ["tls", pytest.param("clear", marks=pytest.mark.slow)])
def test_a_revocation_ends_the_open_calls_of_the_client(tmp_path: Path, kind: str) -> None:
    """An upload, a download and a poll end; others continue; the revoked cannot join again."""
    fleet = SecureFleet(tmp_path) if kind == "tls" else Fleet(tmp_path)
    try:
        fleet.init(4_000_000)
        fleet.start_server(round__minimum_clients=2, round__clients=2, lease_seconds=60)
        names = ("sends", "honest", "fetches", "waits")
        devices = {
            name: fleet.device(name)
            if isinstance(fleet, SecureFleet)
            else Device(fleet.address, name)
            for name in names
        }
        for device in devices.values():
            device.join()
            if device.name == "honest":  # the first two are selected; the others have nothing to do
                devices["sends"].train_task()
                device.train_task()
        polling = in_background(devices["waits"].next_task)
        chunks, encoded = devices["sends"].encode()
        upload, sent = devices["sends"].open(encoded).upload, threading.Event()
        sending = in_background(lambda: devices["sends"].send(upload, slowly(chunks, sent)))
        request = pb.FetchModelRequest(session=devices["fetches"].session)
        model = devices["fetches"].stub.FetchModel(request, timeout=60)
        fetched = len(next(model).data)
        assert sent.wait(30)

        operators = fleet.operator()
        for name in ("sends", "fetches", "waits"):
            operators.Revoke(operator_pb2.RevokeRequest(client=name, reason="stolen"), timeout=20)
        with refused(Code.PERMISSION_DENIED, "client sends was revoked: stolen"):
            sending()
        with refused(Code.PERMISSION_DENIED, "client fetches was revoked: stolen"):
            for chunk in model:
                fetched += len(chunk.data)
        assert fetched < 4 * 4_000_000
        if kind == "tls":
            with refused(Code.PERMISSION_DENIED, "client waits was revoked: stolen"):
                polling()
        else:  # the client is sent to join again, and then refused
            with refused(Code.UNAUTHENTICATED):
                polling()
        for name in ("sends", "fetches", "waits"):
            again = fleet.device(name) if isinstance(fleet, SecureFleet) else devices[name]
            with refused(Code.PERMISSION_DENIED, f"client {name} was revoked"):
                again.join()
        chunks, encoded = devices["honest"].encode()
        receipt = devices["honest"].send(devices["honest"].open(encoded).upload, chunks)
        assert receipt.outcome == pb.OUTCOME_COUNTED
        assert "Traceback" not in fleet.log("server.log")
    finally:
        fleet.end()


@pytest.mark.slow
def test_a_revoked_operators_watch_ends_and_its_certificates_are_refused(
    own: SecureFleet,
) -> None:
    own.init()
    own.start_server()
    lost = OperatorStub(own.channel_of(own.credentials(operator("night-shift"))))
    watching = lost.Watch(operator_pb2.WatchRequest(), timeout=60)
    watching.initial_metadata()
    remaining = own.operator()
    others = remaining.Watch(operator_pb2.WatchRequest(), timeout=120)
    others.initial_metadata()
    file = str(own.credentials_file(operator("operator")))
    done = own.run("revoke", "--operator", "night-shift", "--reason", "lost", "--credentials", file)
    assert done.returncode == 0, done.stderr
    with refused(Code.PERMISSION_DENIED, "operator night-shift was revoked: lost"):
        next(watching)
    with refused(Code.PERMISSION_DENIED, "operator night-shift was revoked: lost"):
        lost.Stop(operator_pb2.StopRequest(), timeout=10)
    own.kill_server()
    own.start_server()
    # A new certificate with the revoked name is refused as well.
    again = OperatorStub(own.channel_of(own.credentials(operator("night-shift"))))
    with refused(Code.PERMISSION_DENIED, "operator night-shift was revoked: lost"):
        again.Pause(operator_pb2.PauseRequest(), timeout=10, wait_for_ready=True)
    own.device("night-shift").join(protocol_version=1)  # a client of that name is another identity
    with refused(Code.UNAVAILABLE):  # the server was killed; until then the other operator watched
        list(others)
