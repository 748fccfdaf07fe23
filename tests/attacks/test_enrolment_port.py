"""The only TLS port that accepts peers without a certificate, and what they can do there."""

from __future__ import annotations

import contextlib
import ssl
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import psutil
import pytest
from hyperframe.frame import SettingsFrame

from fairfleet.common.pki.certificates import certified, new_request
from fairfleet.proto.v1 import enrolment_pb2, operator_pb2
from tests.support.attacks.frames import (
    CONTINUATION,
    DATA,
    END_HEADERS,
    HEADERS,
    PING,
    RST_STREAM,
    Wire,
    frame,
    request,
)
from tests.support.attacks.siege import MIB
from tests.support.fleet import until
from tests.support.secure import SecureFleet, client

ENROL = "/fairfleet.v1.Enrolment/Enrol"
ODD = range(1, 10_001, 2)
GROWTH_MIB = 48
# Unread answers to pings accumulate in gRPC's core, which returns memory at times of its choice.
# Measured: five connections used up to 90 MiB of the server's memory, and twenty no more.
FLOOD_GROWTH_MIB, FLOODS = 128, 20


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecureFleet]:
    """Yield a fleet with TLS in which a client trains all the time."""
    fleet = SecureFleet(tmp_path_factory.mktemp("enrolment"))
    try:
        fleet.init()
        narrow = {"limits__enrolment_connections": 60, "limits__handshake_seconds": 2}
        fleet.start_server(rounds=1_000_000, round__minimum_clients=1, **narrow)
        fleet.start_client("honest", step_seconds=0.05)
        fleet.wait_for_version(2)
        yield fleet
        assert "Traceback" not in fleet.log("server.log")
    finally:
        fleet.end()


@contextlib.contextmanager
def borne(fleet: SecureFleet, growth_mib: int = GROWTH_MIB) -> Iterator[None]:
    """Check that the server lives and has hardly grown.

    A device with a token is enrolled, and the honest client keeps training.
    """
    assert fleet.server is not None
    process = psutil.Process(fleet.server.pid)
    before = process.memory_info().rss
    yield
    assert process.memory_info().rss - before < growth_mib * MIB
    fleet.wait_for_version(fleet.version() + 2)
    make = operator_pb2.MakeTokenRequest(client="late", seconds=60, certificate_seconds=60)
    secret = fleet.operator().MakeToken(make, timeout=20).secret
    enrol_request = enrolment_pb2.EnrolRequest(
        client="late", secret=secret, request=new_request(client("late"))[1]
    )
    assert until(lambda: enrolled(fleet, enrol_request), "a place for a device with a token")


def enrolled(fleet: SecureFleet, enrol_request: enrolment_pb2.EnrolRequest) -> bool:
    try:
        response = fleet.enrolment_stub().Enrol(enrol_request, timeout=20)
    except grpc.RpcError as error:
        if error.code() not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
            raise
        return False
    return certified(response.certificate).identity == client("late")


def inside(fleet: SecureFleet) -> Wire:
    context = ssl.create_default_context(cadata=fleet.ca.decode())
    context.set_alpn_protocols(["h2"])
    return Wire(fleet.enrolment_port, tls=context)


def resets(wire: Wire) -> None:
    for stream in ODD[:2000]:
        wire.send(
            frame(HEADERS, END_HEADERS, stream, request(ENROL)),
            frame(RST_STREAM, 0, stream, bytes(4)),
        )


def headers_without_end(wire: Wire) -> None:
    wire.send(frame(HEADERS, 0, 1, request(ENROL)))
    literal = b"\x00\x7f\x81\x7e" + b"a" * 16_381
    for _ in range(1000):
        if not wire.send(frame(CONTINUATION, 0, 1, literal[:16_384])):
            break


def four_gigabytes(wire: Wire) -> None:
    for stream in ODD[:50]:
        wire.send(frame(HEADERS, END_HEADERS, stream, request(ENROL)))
        wire.send(frame(DATA, 0, stream, b"\0\xff\xff\xff\xff" + bytes(100)))


def pings(wire: Wire) -> None:
    for _ in range(100):
        if not wire.send(frame(PING, 0, 0, bytes(8)) * 100):
            break


def garbage(wire: Wire) -> None:
    wire.send(bytes(range(256)) * 1000)


@pytest.mark.slow
@pytest.mark.parametrize(
    "attack",
    [resets, headers_without_end, four_gigabytes, pings, garbage],
    ids=lambda a: a.__name__,
)
def test_http2_abuse_after_the_handshake_does_no_harm(
    fleet: SecureFleet, attack: Callable[[Wire], Any]
) -> None:
    with borne(fleet, FLOOD_GROWTH_MIB):
        for _ in range(FLOODS):
            wire = inside(fleet)
            attack(wire)
            wire.close()


def test_unfinished_calls_hold_few_places_for_a_short_time(fleet: SecureFleet) -> None:
    """Open every allowed connection with every allowed call, and send half a message on each."""
    with borne(fleet), contextlib.ExitStack() as stack:
        opened = list[Wire]()
        for _ in range(100):
            with contextlib.suppress(OSError):
                opened.append(inside(fleet))
                stack.callback(opened[-1].close)
        assert len(opened) <= 60
        for wire in opened:
            wire.send(*(frame(HEADERS, END_HEADERS, stream, request(ENROL)) for stream in ODD[:16]))
            wire.send(
                *(frame(DATA, 0, stream, b"\0\0\0\xf0\0" + bytes(16_000)) for stream in ODD[:16])
            )
        settings = next(
            received for received in opened[0].frames() if isinstance(received, SettingsFrame)
        )
        assert settings.settings[SettingsFrame.MAX_CONCURRENT_STREAMS] == 16
        fleet.wait_for_version(fleet.version() + 2)


@pytest.mark.slow
def test_a_message_larger_than_any_request_is_refused(fleet: SecureFleet) -> None:
    with borne(fleet):
        call = fleet.enrolment_channel().unary_unary(ENROL)
        for size in (70_000, 1 << 20, 4 << 20):
            with pytest.raises(grpc.RpcError) as error:
                call(bytes(size), timeout=20)
            assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


@pytest.mark.slow
def test_two_thousand_wrong_tokens_from_one_address_are_limited(fleet: SecureFleet) -> None:
    wrong = enrolment_pb2.EnrolRequest(
        client="late", secret=bytes(32), request=new_request(client("late"))[1]
    )
    with borne(fleet):
        lines, codes = len(fleet.log("server.log")), Counter[grpc.StatusCode]()
        for _ in range(4):
            stub = fleet.enrolment_stub()
            for _ in range(500):
                with pytest.raises(grpc.RpcError) as error:
                    stub.Enrol(wrong, timeout=60)
                codes[error.value.code()] += 1
        assert set(codes) == {
            grpc.StatusCode.PERMISSION_DENIED,
            grpc.StatusCode.RESOURCE_EXHAUSTED,
        }, codes
        assert codes[grpc.StatusCode.RESOURCE_EXHAUSTED] > 1000
        assert len(fleet.log("server.log")) - lines < 40_000  # thirty a minute are logged
