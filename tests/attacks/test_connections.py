"""Peers that have not identified themselves:

garbage, slow-loris, floods of frames and connections.
"""

from __future__ import annotations

import random
import socket

import grpc
import pytest
from hyperframe.frame import GoAwayFrame, RstStreamFrame

from fairfleet.proto.v1 import fleet_pb2 as pb
from tests.support.attacks.frames import (
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    PING,
    PREFACE,
    RST_STREAM,
    SETTINGS,
    Wire,
    closed,
    frame,
    message,
    request,
    wires,
)
from tests.support.attacks.siege import Siege, refused, some_bytes
from tests.support.device import Device
from tests.support.fleet import until

JOIN, SEND, FETCH = (f"/fairfleet.v1.Fleet/{name}" for name in ("Join", "SendUpload", "FetchModel"))
ODD = range(1, 1_000_000, 2)  # the stream ids that a client uses


def test_garbage_on_the_port_does_no_harm(siege: Siege) -> None:
    dice = random.Random(9)
    with siege.borne():
        for _ in range(100):
            wire = Wire(siege.port, some_bytes(dice, 2000))
            wire.send(some_bytes(dice, 2000))
            wire.close()


@pytest.mark.parametrize(
    "begin",
    [
        pytest.param(PREFACE[:10], id="half a preface"),
        pytest.param(b"", id="silence", marks=pytest.mark.slow),
        pytest.param(PREFACE, id="no settings", marks=pytest.mark.slow),
        pytest.param(
            b"\x16\x03\x01\x02\x00\x01\x00", id="half a TLS hello", marks=pytest.mark.slow
        ),
        pytest.param(
            PREFACE + frame(SETTINGS, 0, 0)[:5], id="half a frame", marks=pytest.mark.slow
        ),
    ],
)
def test_a_connection_without_a_handshake_is_closed(siege: Siege, begin: bytes) -> None:
    with siege.borne(), wires(siege.port, 30, begin) as opened:
        assert len(opened) == 30
        until(lambda: closed(opened) == 30, "all to be hung up on")


@pytest.mark.slow
def test_headers_that_never_end_hold_up_nothing(siege: Siege) -> None:
    """Each connection sends half of a request's headers, stays idle and is closed.

    None of them delays another client.
    """
    half = request(JOIN)[:20]
    with siege.borne(), wires(siege.port, 30) as opened:
        for wire in opened:
            wire.send(frame(HEADERS, 0, 1, half))
        siege.trains_on()


def test_a_flood_of_continuations_is_not_stored(siege: Siege) -> None:
    """One connection sends 32 MiB of headers that never end."""
    with siege.borne():
        wire = Wire(siege.port)
        wire.send(frame(HEADERS, 0, 1, request(JOIN)))
        literal = b"\x00\x7f\x81\x7e" + b"a" * 16_381  # a name of 16 KiB that does not end
        took = [wire.send(frame(CONTINUATION, 0, 1, literal[:16_384])) for _ in range(2000)]
        wire.close()
        assert took[0]


@pytest.mark.slow
def test_header_lists_beyond_the_limit(siege: Siege) -> None:
    with siege.borne(), grpc.insecure_channel(siege.address) as channel:
        join = channel.unary_unary(JOIN, pb.JoinRequest.SerializeToString, None)
        for size in (20_000, 100_000, 1_000_000):
            with refused(grpc.StatusCode.RESOURCE_EXHAUSTED):
                join(pb.JoinRequest(), metadata=(("x-large", "a" * size),), timeout=20)
        many = tuple((f"x-{k}", "a" * 10) for k in range(5000))
        with refused(grpc.StatusCode.RESOURCE_EXHAUSTED):
            join(pb.JoinRequest(), metadata=many, timeout=20)


def test_a_header_bomb_is_not_unpacked(siege: Siege) -> None:
    """HPACK: 4 KiB in the table, referenced 16,000 times: 64 MiB of headers in 16 KiB."""
    value = b"a" * 3900
    insert = (
        b"\x40\x01x"
        + b"\x7f"
        + bytes([(len(value) - 127) & 127 | 128, (len(value) - 127) >> 7])
        + value
    )
    with siege.borne():
        wire = Wire(siege.port)
        wire.send(frame(HEADERS, END_HEADERS, 1, request(JOIN) + insert + b"\xbe" * 12_000))
        wire.send(frame(DATA, END_STREAM, 1, message(b"")))
        headers = next(
            f
            for f in wire.frames()
            if isinstance(f, (RstStreamFrame, GoAwayFrame)) or f.stream_id == 1
        )
        assert headers is not None
        wire.close()


def test_a_message_that_claims_four_gigabytes(siege: Siege) -> None:
    with siege.borne():
        for stream in ODD[:50]:
            wire = Wire(siege.port)
            wire.send(frame(HEADERS, END_HEADERS, stream, request(JOIN)))
            wire.send(frame(DATA, 0, stream, b"\0\xff\xff\xff\xff" + bytes(100)))
            wire.close()


@pytest.mark.slow
def test_floods_of_settings_and_pings(siege: Siege) -> None:
    with siege.borne():
        for flood in (
            frame(SETTINGS, 0, 0, b"\0\3\0\0\0\1") * 100,
            frame(PING, 0, 0, bytes(8)) * 100,
        ):
            wire = Wire(siege.port)
            for _ in range(200):  # 20,000 frames whose answers are not read
                if not wire.send(flood):
                    break
            wire.close()


def test_rapid_reset(siege: Siege) -> None:
    """Open 5,000 calls and cancel each at once."""
    block = request(JOIN)
    with siege.borne():
        wire = Wire(siege.port)
        for stream in ODD[:5000]:
            call = frame(HEADERS, END_HEADERS, stream, block) + frame(
                DATA, END_STREAM, stream, message(b"")
            )
            if not wire.send(call + frame(RST_STREAM, 0, stream, b"\0\0\0\x08")):
                break
        wire.close()


def test_two_thousand_streams_on_one_connection(siege: Siege) -> None:
    """Uploads that never send: at most 100 are under way, the others are refused."""
    block = request(SEND)
    with siege.borne():
        wire = Wire(siege.port)
        for stream in ODD[:2000]:
            if not wire.send(frame(HEADERS, END_HEADERS, stream, block)):
                break
        wire.socket.settimeout(10)
        answers: list[object] = []
        for received in wire.frames():
            answers.append(received)
            if isinstance(received, (RstStreamFrame, GoAwayFrame)):
                break
        assert isinstance(answers[-1], (RstStreamFrame, GoAwayFrame))
        wire.close()


@pytest.mark.slow
def test_connections_beyond_the_limit(siege: Siege) -> None:
    """Of 300 valid connections, those beyond the limit are closed; the honest client stays."""
    with siege.borne(growth_mib=40), wires(siege.port, 300) as opened:
        until(lambda: closed(opened) > 150, "those beyond the limit to be hung up on")
        siege.trains_on()
    until(lambda: _joins(siege), "a place for another client")


def _joins(siege: Siege) -> bool:
    device = Device(siege.address, "after-the-flood")
    try:
        device.join()
        device.leave()
    except grpc.RpcError:
        return False
    return True


@pytest.mark.slow
def test_unread_downloads_use_bounded_memory(siege: Siege) -> None:
    """The model is larger than a connection's window, and this peer acknowledges nothing."""
    device = Device(siege.address, "sleeper")
    device.join()
    version = device.train_task().model.version
    body = message(
        pb.FetchModelRequest(session=device.session, version=version).SerializeToString()
    )
    before, block = siege.refused("slow_reader"), request(FETCH)
    with siege.borne():
        wire = Wire(siege.port)
        for stream in ODD[:50]:
            wire.send(
                frame(HEADERS, END_HEADERS, stream, block) + frame(DATA, END_STREAM, stream, body)
            )
        until(
            lambda: siege.refused("slow_reader") == before + 2,
            "the server to lose patience with those it let begin",
        )
        assert siege.refused("downloads") >= 40
        device.join()
        with refused(grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.NOT_FOUND) as error:
            list(
                device.stub.FetchModel(
                    pb.FetchModelRequest(session=device.session, version=version)
                )
            )
        wire.close()
        until(lambda: fetches(device), "the places to be free again")
        assert error
    device.leave()


def fetches(device: Device) -> bool:
    device.join()
    fetch_request = pb.FetchModelRequest(
        session=device.session, version=device.train_task().model.version
    )
    try:
        return bool(list(device.stub.FetchModel(fetch_request)))
    except grpc.RpcError:
        return False


@pytest.mark.slow
def test_half_open_connections_do_no_harm(siege: Siege) -> None:
    """Open connections in part and close them in all the usual ways."""
    with siege.borne():
        for how in (socket.SHUT_RD, socket.SHUT_WR, socket.SHUT_RDWR):
            for begin in (b"", PREFACE, PREFACE + frame(SETTINGS, 0, 0) + bytes(100_000)):
                wire = Wire(siege.port, begin)
                wire.socket.shutdown(how)
                wire.close()
