"""Clients that call too often, hold too much, send too slowly, or claim and send what is far too large."""

from __future__ import annotations

import struct
import threading
import time
import zlib
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import grpc
import pytest
import zstandard
from hpack import Decoder
from hyperframe.frame import HeadersFrame

from fairfleet.client.link import Link
from fairfleet.common.access import Access
from fairfleet.common.stream import Encoded, xxh3_128_digest
from fairfleet.common.wire import RETRY_METADATA
from fairfleet.proto.v1 import fleet_pb2 as pb
from fairfleet.proto.v1.model_pb2 import Chunk, Signature, TensorSpec
from tests.attacks.frames import DATA, END_HEADERS, END_STREAM, HEADERS, Wire, frame, request
from tests.attacks.siege import MIB, Siege, calls_until_refused, refused
from tests.e2e.device import Device
from tests.e2e.fleet import Fleet, until

Code = grpc.StatusCode


@pytest.fixture
def device(siege: Siege, request: pytest.FixtureRequest) -> Iterator[Device]:
    """A client of its own name for each test: limits are by client. It has a task."""
    device = Device(siege.address, f"d{abs(hash(request.node.name))}")
    device.join(instance="the same")
    device.train_task()
    yield device
    device.channel.close()


def fresh(device: Device) -> Device:
    """With a session, and a task of the round under way: the honest client goes on all the time."""
    device.join(instance="the same")
    device.train_task()
    return device


# ---- too often -----------------------------------------------------------------------------------


def told_when(error: Any) -> float:
    return float(next(one.value for one in error.trailing_metadata() if one.key == RETRY_METADATA))


def test_joining_again_and_again(siege: Siege) -> None:
    device = Device(siege.address, "restless")
    with siege.borne():
        count, error = calls_until_refused(lambda: device.join(instance="the same"), 100)
        assert 30 <= count < 40
        assert error.code() is Code.RESOURCE_EXHAUSTED
        assert "joined more than 30 times a minute" in error.details()
        assert 0 < told_when(error) <= 2
        assert siege.refused("joins") >= 1
    Device(siege.address, "another").join()  # the limit is the client's own


@pytest.mark.slow
def test_polling_again_and_again(siege: Siege, device: Device) -> None:
    """Every poll brings the same task."""
    with siege.borne():
        count, error = calls_until_refused(device.next_task, 200)
        assert 20 <= count < 100  # a poll that brings the task of a new round is free
        assert error.code() is Code.RESOURCE_EXHAUSTED
        assert "asked for a task in vain more than 30 times a minute" in error.details()
        assert 0 < told_when(error) <= 2
        assert siege.refused("polls") >= 1


@pytest.mark.slow
def test_calling_again_and_again(siege: Siege, device: Device) -> None:
    heartbeat = pb.HeartbeatRequest(session=device.session, task=device.task.id)
    with siege.borne():
        count, error = calls_until_refused(lambda: device.stub.Heartbeat(heartbeat), 2000)
        assert 500 <= count < 1500
        assert error.code() is Code.RESOURCE_EXHAUSTED
        assert siege.refused("calls") >= 1


@pytest.mark.slow
def test_our_own_client_backs_off_when_it_is_told_to(siege: Siege) -> None:
    """More polls than are allowed: the link waits as long as the server says, and none fails."""
    join = pb.JoinRequest(client="eager", instance="x", protocol_version=1, codecs=["raw32"])
    link = Link(Access(siege.address), join)
    for _ in range(32):
        assert link.next_task().WhichOneof("task") in ("train", "wait")
    assert siege.refused("polls") >= 1
    link.leave("enough")


@pytest.mark.slow
def test_a_fast_federation_is_not_held_up(tmp_path: Path) -> None:
    """Forty rounds in seconds, and three polls in vain a minute allowed: every poll of these brings a new task."""
    fleet = Fleet(tmp_path)
    try:
        fleet.init()
        fleet.start_server(rounds=40, exit_when_finished=True, limits__polls_per_minute=3)
        for name in ("ann", "bob"):
            fleet.start_client(name)
        assert set(fleet.wait_clients().values()) == {0}
        for name in ("ann", "bob"):
            assert "joined" in fleet.log(f"{name}.log")
            assert "asks for patience" not in fleet.log(f"{name}.log")
        fleet.prove(40)
    finally:
        fleet.end()


# ---- too much at once ----------------------------------------------------------------------------


@pytest.mark.slow
def test_uploads_that_are_opened_and_never_sent(siege: Siege, device: Device) -> None:
    """200 announcements, each of another update: the server holds one of them, and nothing of what they claim."""
    _, encoded = fresh(device).encode()
    with siege.borne():
        for number in range(200):
            if not opens(device, encoded, number):
                fresh(device)  # the round went on


def opens(device: Device, encoded: Encoded, number: int) -> bool:
    try:
        device.open(encoded, digest=number.to_bytes(32, "big"), size_bytes=2 * MIB)
    except grpc.RpcError as error:
        if error.code() is not Code.FAILED_PRECONDITION:
            raise
        return False
    return True


def test_an_upload_that_sends_nothing_is_ended(siege: Siege, device: Device) -> None:
    held = threading.Event()

    def nothing() -> Iterator[Chunk]:
        held.wait(30)
        yield from ()

    _, encoded = fresh(device).encode()
    with siege.borne(), refused(Code.DEADLINE_EXCEEDED) as told:
        device.send(device.open(encoded).upload, nothing())
    held.set()
    assert "too little came within 2 s" in told["details"]
    assert siege.refused("slow_upload") >= 1


@pytest.mark.slow
def test_an_upload_that_trickles_is_ended_too(siege: Siege, device: Device) -> None:
    """One value now and then keeps no place for ever: 2.4 MB may take 2 + 2 times as long as one chunk may."""
    ended = threading.Event()

    def drops() -> Iterator[Chunk]:
        for number in range(60):
            data = bytes(4)
            yield Chunk(
                offset_bytes=4 * number, data=data, checksum=xxh3_128_digest(data), section=1,
                first_element=number, elements=1,
            )  # fmt: skip
            if ended.wait(0.5):
                return

    _, encoded = fresh(device).encode()
    with siege.borne(), refused(Code.DEADLINE_EXCEEDED, Code.FAILED_PRECONDITION):
        device.send(device.open(encoded).upload, drops())
    ended.set()


@pytest.mark.slow
def test_more_uploads_at_once_than_a_client_may_have(siege: Siege, device: Device) -> None:
    held = threading.Event()

    def nothing() -> Iterator[Chunk]:
        held.wait(30)
        yield from ()

    _, encoded = fresh(device).encode()
    metadata = (("fairfleet-upload-bin", device.open(encoded).upload),)
    with siege.borne():
        calls = [device.stub.SendUpload.future(nothing(), metadata=metadata) for _ in range(40)]
        codes = [call.code() for call in calls]
        held.set()
    assert set(codes) <= {Code.RESOURCE_EXHAUSTED, Code.DEADLINE_EXCEEDED, Code.FAILED_PRECONDITION}
    assert codes.count(Code.RESOURCE_EXHAUSTED) >= 30
    assert siege.refused("uploads") >= 30


# ---- too large -----------------------------------------------------------------------------------


def joining(**fields: Any) -> pb.JoinRequest:
    return pb.JoinRequest(**({"client": "large", "instance": "x", "protocol_version": 1, "codecs": ["raw32"]} | fields))


MANY_DIMENSIONS = Signature(tensors=[TensorSpec(name="w", shape=[2**63] * 300_000, dtype="float32", section=1)])
MANY_TENSORS = Signature(tensors=[TensorSpec(name=f"t{k}", dtype="float32", section=1) for k in range(150_000)])
LONG_NAME = Signature(tensors=[TensorSpec(name="n" * 3_000_000, shape=[3], dtype="float32", section=1)])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("request_", "code", "words"),
    [
        (joining(software="s" * 5_000_000), Code.RESOURCE_EXHAUSTED, "larger than max"),
        (joining(client="c" * 3_000_000), Code.INVALID_ARGUMENT, "1 to 64"),
        (joining(instance="i" * 3_000_000), Code.INVALID_ARGUMENT, "at most 64"),
        (joining(codecs=["raw32"] * 500_000), Code.INVALID_ARGUMENT, "found 500000 codecs; at most 64"),
        (joining(codecs=["c" * 3_000_000]), Code.INVALID_ARGUMENT, "64 characters"),
        (joining(signature=MANY_DIMENSIONS), Code.INVALID_ARGUMENT, "300000 dimensions; at most 64"),
        (joining(signature=MANY_TENSORS), Code.INVALID_ARGUMENT, "has 150000 tensors"),
        (joining(signature=LONG_NAME), Code.INVALID_ARGUMENT, "is missing"),
    ],
    ids=["message", "name", "instance", "codecs", "long codec", "dimensions", "tensors", "tensor's name"],
)
def test_a_join_that_is_far_too_large(siege: Siege, request_: pb.JoinRequest, code: Code, words: str) -> None:
    with siege.borne(growth_mib=48), grpc.insecure_channel(siege.address) as channel:
        join: Any = channel.unary_unary("/fairfleet.v1.Fleet/Join", pb.JoinRequest.SerializeToString, None)
        with refused(code) as told:
            join(request_, timeout=30)
        assert words.lower() in told["details"].lower()
        assert len(told["details"]) < 1000


def test_what_is_claimed_of_an_update(siege: Siege, device: Device) -> None:
    _, encoded = fresh(device).encode()
    with siege.borne():
        for size in (2**63, 2**64 - 1, 10**12):
            with refused(Code.RESOURCE_EXHAUSTED) as told:
                device.open(encoded, size_bytes=size)
            assert f"declared {size} bytes" in told["details"]
        report = pb.TrainReport(samples=1, loss_before=1, loss_after=1, cut_by=["x" * 1000] * 1000)
        with refused(Code.INVALID_ARGUMENT) as told:
            device.open(encoded, report=report)
        with refused(Code.INVALID_ARGUMENT):
            device.open(encoded, codec="topk:" + "1" * 2_000_000)
        with refused(Code.INVALID_ARGUMENT):
            device.open(encoded, digest=bytes(3_000_000))
    assert siege.refused("upload_bytes") >= 3


def attempt(device: Device, codec: str, messages: list[bytes]) -> Any:
    """Sends what is no update, until the round stays long enough for it to be looked at; the error."""
    for _ in range(20):
        fresh(device)
        _, encoded = device.encode()
        try:
            device.send_raw(device.open(encoded, codec=codec).upload, messages)
        except grpc.RpcError as error:
            if error.code() is not Code.FAILED_PRECONDITION:
                return error
            time.sleep(0.05)
    raise AssertionError("the round went on every time")


def chunk(data: bytes, elements: int) -> bytes:
    return Chunk(data=data, checksum=xxh3_128_digest(data), section=1, elements=elements).SerializeToString()


def test_decompression_bombs_in_an_update(siege: Siege, device: Device) -> None:
    bomb = zstandard.ZstdCompressor(level=1).compress(bytes(512 * MIB))
    assert len(bomb) < MIB
    hidden = zstandard.ZstdCompressor(level=3, write_content_size=False).compress(bytes(64 * MIB))
    with siege.borne():
        for data in (bomb, hidden):
            error = attempt(device, "raw32+zstd", [chunk(data, 262_144)])
            assert error.code() is Code.INVALID_ARGUMENT
            assert "zstd frame declares" in error.details()


@pytest.mark.slow
@pytest.mark.parametrize(("encoding", "wbits"), [("gzip", 31), ("deflate", 15)])
def test_a_decompression_bomb_in_grpcs_own_compression(siege: Siege, encoding: str, wbits: int) -> None:
    """gRPC would unpack it before it compares it with any limit: a thousand times what is sent."""
    packer = zlib.compressobj(9, zlib.DEFLATED, wbits)
    bomb = b"".join([*(packer.compress(bytes(MIB)) for _ in range(60)), packer.flush()])
    assert len(bomb) < 65_000, "what a connection may send before it hears more"
    with siege.borne():
        wire = Wire(siege.port)
        headers = request("/fairfleet.v1.Fleet/Join", ("grpc-encoding", encoding))
        body = b"\1" + struct.pack(">I", len(bomb)) + bomb
        wire.send(frame(HEADERS, END_HEADERS, 1, headers))
        for at in range(0, len(body), 16_384):
            wire.send(frame(DATA, 0, 1, body[at : at + 16_384]))
        wire.send(frame(DATA, END_STREAM, 1))
        assert status_of(wire) in (Code.UNIMPLEMENTED.value[0], Code.INVALID_ARGUMENT.value[0])
        wire.close()


def status_of(wire: Wire) -> int:
    """The status of the only call on a connection."""
    decoder = Decoder()
    for found in wire.frames():
        if isinstance(found, HeadersFrame):
            told = dict(decoder.decode(found.data))
            if "grpc-status" in told:
                return int(told["grpc-status"])
    raise AssertionError("hung up without a status")


@pytest.mark.slow
def test_chunks_that_are_nothing_but_fields(siege: Siege, device: Device) -> None:
    with siege.borne():
        error = attempt(device, "raw32", [b"\x38\x01" * 400_000] * 3)
        assert error.code() is Code.INVALID_ARGUMENT
        assert "more than 64 fields" in error.details()


@pytest.mark.slow
def test_a_chunk_beyond_any_message(siege: Siege, device: Device) -> None:
    with siege.borne():
        assert attempt(device, "raw32", [bytes(6 * MIB)]).code() is Code.RESOURCE_EXHAUSTED


@pytest.mark.slow
def test_names_without_end(siege: Siege) -> None:
    """Each leaves something behind, so there is an end to them; who is known may come back. It uses all up."""
    with siege.borne():

        def join_and_leave() -> None:
            nonlocal number
            number += 1
            guest = Device(siege.address, f"name-{number}")
            with closing(guest.channel):
                guest.join()
                guest.stub.Leave(pb.LeaveRequest(session=guest.session))

        number = 0
        count, error = calls_until_refused(join_and_leave, 1000)
        assert count < 400
        assert error.code() is Code.RESOURCE_EXHAUSTED
        assert "are known" in error.details()
        back = Device(siege.address, "name-1")
        back.join()
        back.leave()


@pytest.mark.slow
def test_the_server_forgets_whom_it_refused(siege: Siege) -> None:
    """Everybody of this module who did not behave is gone when its lease is over."""
    until(lambda: siege.fleet.status().connected <= 2, "leases to end")
