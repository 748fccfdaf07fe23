"""A member's limits are its own: whatever it calls, with whatever session, it calls for itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2
from grpc_health.v1.health_pb2_grpc import HealthStub

from fairfleet.proto.v1 import fleet_pb2 as pb
from tests.attacks.siege import calls_until_refused
from tests.e2e.device import REPORT, Device
from tests.e2e.fleet import Fleet, free_port, until
from tests.e2e.scraping import scrape, series
from tests.e2e.secure import SecureFleet, client
from tests.e2e.test_refusals import refused

Code = grpc.StatusCode
PER_MINUTE = 40


def made_up_session(device: Device) -> Any:
    return device.stub.Heartbeat(pb.HeartbeatRequest(session="made up"), timeout=20)


def announced_upload(device: Device) -> Any:
    announced = pb.OpenUploadRequest(session="made up", report=REPORT).SerializeToString()
    return device.open_and_send(announced, [])


def made_up_upload(device: Device) -> Any:
    return device.send(b"made up", [])


def join_as_another(device: Device) -> Any:
    return device.join(client="another")


def malformed(device: Device) -> Any:
    return device.channel.unary_unary("/fairfleet.v1.Fleet/NextTask")(b"\xff", timeout=20)


def not_for_clients(device: Device) -> Any:
    return device.channel.unary_unary("/fairfleet.v1.Operator/Stop")(b"", timeout=20)


def health(device: Device) -> Any:
    return HealthStub(device.channel).Check(health_pb2.HealthCheckRequest(), timeout=20)


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Any:
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
    [made_up_session, announced_upload, made_up_upload, join_as_another, malformed, not_for_clients, health],
    ids=lambda call: call.__name__,
)
def test_every_call_of_a_certificate_counts_as_its_own(narrow: Any, call: Callable[[Device], Any]) -> None:
    """Whatever is in it: a session that is made up, or another's, is no way round the limit."""
    eve = narrow.device(f"eve-{call.__name__.replace('_', '-')}")

    def one() -> None:
        try:
            call(eve)
        except grpc.RpcError as error:
            if error.code() is Code.RESOURCE_EXHAUSTED:
                raise

    before = scrape(narrow.http)[series("fairfleet_refused_total", reason="calls")]
    count, error = calls_until_refused(one, 40 * PER_MINUTE)
    assert PER_MINUTE <= count < 4 * PER_MINUTE
    assert f"client {eve.name} called more than {PER_MINUTE} times a minute" in error.details()
    assert scrape(narrow.http)[series("fairfleet_refused_total", reason="calls")] == before + 1
    narrow.device(f"not-{eve.name}").join()  # has its own


def test_in_the_clear_uploads_count_too(fleet: Fleet) -> None:
    fleet.init()
    fleet.start_server(limits__calls_per_minute=PER_MINUTE, round__minimum_clients=1)
    device = Device(fleet.address, "eve", fleet.channel())
    device.join()
    device.train_task()
    _, encoded = device.encode()
    announced = device.announcement(encoded).SerializeToString()

    def torn() -> None:
        try:
            device.open_and_send(announced, [])  # of which nothing comes
        except grpc.RpcError as error:
            if error.code() is Code.RESOURCE_EXHAUSTED:
                raise

    count, error = calls_until_refused(torn, 40 * PER_MINUTE)
    assert count < 4 * PER_MINUTE
    assert "client eve called more than" in error.details()
    device.channel.close()


def test_whoever_knows_anothers_session_does_not_keep_its_lease_alive(own: SecureFleet) -> None:
    own.init()
    own.start_server(lease_seconds=3)
    ann, eve = own.device("ann"), own.device("eve")
    session = ann.join().session
    eve.join()

    def ended() -> bool:
        with pytest.raises(grpc.RpcError) as error:
            eve.stub.Heartbeat(pb.HeartbeatRequest(session=session), timeout=20)
        assert error.value.code() in (Code.PERMISSION_DENIED, Code.UNAUTHENTICATED)  # another's, or nobody's any more
        return error.value.code() is Code.UNAUTHENTICATED

    until(ended, "its lease to end")
    assert "client ann is gone: silent for 3 s" in own.log("server.log")


def test_health_is_watched_by_operators_only(narrow: Any) -> None:
    """A watch is held open, and no limit of a client's knows it."""
    request = health_pb2.HealthCheckRequest()
    with refused(Code.PERMISSION_DENIED, "/grpc.health.v1.Health/Watch needs a certificate of operator"):
        next(HealthStub(narrow.channel_of(narrow.credentials(client("watcher")))).Watch(request, timeout=20))
    watching = HealthStub(narrow.channel()).Watch(request, timeout=20)
    assert next(watching).status == health_pb2.HealthCheckResponse.SERVING
    watching.cancel()
