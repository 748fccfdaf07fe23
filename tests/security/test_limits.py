"""Calls count against the client whose certificate makes them, whatever session they name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2
from grpc_health.v1.health_pb2_grpc import HealthStub

from fairfleet.proto.v1 import fleet_pb2 as pb
from tests.support.attacks.siege import calls_until_refused
from tests.support.device import REPORT, Device
from tests.support.fleet import Fleet, free_port, until
from tests.support.refusals import refused
from tests.support.scraping import scrape, series
from tests.support.secure import SecureFleet, client

Code = grpc.StatusCode
PER_MINUTE = 40


def made_up_session(device: Device) -> Any:
    """Send a heartbeat of a session that does not exist."""
    return device.stub.Heartbeat(pb.HeartbeatRequest(session="made up"), timeout=20)


def announced_upload(device: Device) -> Any:
    """Announce an upload of a session that does not exist."""
    announced = pb.OpenUploadRequest(session="made up", report=REPORT).SerializeToString()
    return device.open_and_send(announced, [])


def made_up_upload(device: Device) -> Any:
    """Send to an upload that does not exist."""
    return device.send(b"made up", [])


def join_as_another(device: Device) -> Any:
    """Join under the name of another client."""
    return device.join(client="another")


def malformed(device: Device) -> Any:
    """Send bytes that are no message."""
    return device.channel.unary_unary("/fairfleet.v1.Fleet/NextTask")(b"\xff", timeout=20)


def not_for_clients(device: Device) -> Any:
    """Call an RPC for operators."""
    return device.channel.unary_unary("/fairfleet.v1.Operator/Stop")(b"", timeout=20)


def health(device: Device) -> Any:
    """Check the server's health."""
    return HealthStub(device.channel).Check(health_pb2.HealthCheckRequest(), timeout=20)


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Yield a fleet whose server accepts few calls a minute."""
    fleet = SecureFleet(tmp_path_factory.mktemp("narrow"))
    try:
        fleet.init()
        fleet.http = free_port()
        fleet.start_server(limits__calls_per_minute=PER_MINUTE, http__port=fleet.http)
        yield fleet
    finally:
        fleet.end()


@pytest.mark.parametrize(
    "call",
    [
        made_up_session,
        announced_upload,
        made_up_upload,
        join_as_another,
        malformed,
        not_for_clients,
        health,
    ],
    ids=lambda call: call.__name__,
)
def test_every_call_counts_against_the_caller_whatever_it_names(
    narrow: Any, call: Callable[[Device], Any]
) -> None:
    """An invented session, or that of another client, does not bypass the limit."""
    eve = narrow.device(f"eve-{call.__name__.replace('_', '-')}")

    def call_once() -> None:
        try:
            call(eve)
        except grpc.RpcError as error:
            if error.code() is Code.RESOURCE_EXHAUSTED:
                raise

    before = scrape(narrow.http)[series("fairfleet_refused_total", reason="calls")]
    count, error = calls_until_refused(call_once, 40 * PER_MINUTE)
    assert PER_MINUTE <= count < 4 * PER_MINUTE
    assert f"client {eve.name} called more than {PER_MINUTE} times a minute" in error.details()
    assert scrape(narrow.http)[series("fairfleet_refused_total", reason="calls")] == before + 1
    narrow.device(f"not-{eve.name}").join()  # another client has a limit of its own


def test_uploads_count_without_tls_too(fleet: Fleet) -> None:
    fleet.init()
    fleet.start_server(limits__calls_per_minute=PER_MINUTE, round__minimum_clients=1)
    device = Device(fleet.address, "eve", fleet.channel())
    device.join()
    device.train_task()
    _, encoded = device.encode()
    announced = device.announcement(encoded).SerializeToString()

    def send_nothing() -> None:
        try:
            device.open_and_send(announced, [])
        except grpc.RpcError as error:
            if error.code() is Code.RESOURCE_EXHAUSTED:
                raise

    count, error = calls_until_refused(send_nothing, 40 * PER_MINUTE)
    assert count < 4 * PER_MINUTE
    assert "client eve called more than" in error.details()
    device.channel.close()


@pytest.mark.slow
def test_a_client_cannot_keep_the_lease_of_another_alive(own: SecureFleet) -> None:
    own.init()
    own.start_server(lease_seconds=3)
    ann, eve = own.device("ann"), own.device("eve")
    session = ann.join().session
    eve.join()

    def lease_ended() -> bool:
        with pytest.raises(grpc.RpcError) as error:
            eve.stub.Heartbeat(pb.HeartbeatRequest(session=session), timeout=20)
        # The session is another client's, or no longer exists.
        assert error.value.code() in (Code.PERMISSION_DENIED, Code.UNAUTHENTICATED)
        return error.value.code() is Code.UNAUTHENTICATED

    until(lease_ended, "its lease to end")
    assert "client ann is gone: silent for 3 s" in own.log("server.log")


def test_only_operators_can_watch_the_health(narrow: Any) -> None:
    """A watch stays open, and the limits of a client do not cover it."""
    request = health_pb2.HealthCheckRequest()
    with refused(
        Code.PERMISSION_DENIED, "/grpc.health.v1.Health/Watch needs a certificate of operator"
    ):
        next(
            HealthStub(narrow.channel_of(narrow.credentials(client("watcher")))).Watch(
                request, timeout=20
            )
        )
    watching = HealthStub(narrow.channel()).Watch(request, timeout=20)
    assert next(watching).status == health_pb2.HealthCheckResponse.SERVING
    watching.cancel()
