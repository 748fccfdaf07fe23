"""Messages that claim or contain far too much, and decompression bombs."""

from __future__ import annotations

import struct
import time
import zlib
from typing import Any

import grpc
import pytest
import zstandard
from hpack import Decoder
from hyperframe.frame import HeadersFrame

from fairfleet.common.chunk_stream import xxh3_128_digest
from fairfleet.proto.v1 import fleet_pb2 as pb
from fairfleet.proto.v1.model_pb2 import Chunk, Signature, TensorSpec
from tests.support.attacks.frames import (
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    Wire,
    frame,
    request,
)
from tests.support.attacks.siege import MIB, Siege, refused, rejoin_for_task
from tests.support.device import Device

Code = grpc.StatusCode


def joining(**fields: Any) -> pb.JoinRequest:
    return pb.JoinRequest(
        **(
            {"client": "large", "instance": "x", "protocol_version": 1, "codecs": ["raw32"]}
            | fields
        )
    )


MANY_DIMENSIONS = Signature(
    tensors=[TensorSpec(name="w", shape=[2**63] * 300_000, dtype="float32", section=1)]
)


MANY_TENSORS = Signature(
    tensors=[TensorSpec(name=f"t{k}", dtype="float32", section=1) for k in range(150_000)]
)


LONG_NAME = Signature(
    tensors=[TensorSpec(name="n" * 3_000_000, shape=[3], dtype="float32", section=1)]
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("request_", "code", "words"),
    [
        (joining(software="s" * 5_000_000), Code.RESOURCE_EXHAUSTED, "larger than max"),
        (joining(client="c" * 3_000_000), Code.INVALID_ARGUMENT, "1 to 64"),
        (joining(instance="i" * 3_000_000), Code.INVALID_ARGUMENT, "at most 64"),
        (
            joining(codecs=["raw32"] * 500_000),
            Code.INVALID_ARGUMENT,
            "found 500000 codecs; at most 64",
        ),
        (joining(codecs=["c" * 3_000_000]), Code.INVALID_ARGUMENT, "64 characters"),
        (
            joining(signature=MANY_DIMENSIONS),
            Code.INVALID_ARGUMENT,
            "300000 dimensions; at most 64",
        ),
        (joining(signature=MANY_TENSORS), Code.INVALID_ARGUMENT, "has 150000 tensors"),
        (joining(signature=LONG_NAME), Code.INVALID_ARGUMENT, "is missing"),
    ],
    ids=[
        "message",
        "name",
        "instance",
        "codecs",
        "long codec",
        "dimensions",
        "tensors",
        "tensor's name",
    ],
)
def test_a_join_that_is_far_too_large_is_refused(
    siege: Siege, request_: pb.JoinRequest, code: Code, words: str
) -> None:
    with siege.borne(growth_mib=48), grpc.insecure_channel(siege.address) as channel:
        join: Any = channel.unary_unary(
            "/fairfleet.v1.Fleet/Join", pb.JoinRequest.SerializeToString, None
        )
        with refused(code) as error:
            join(request_, timeout=30)
        assert words.lower() in error["details"].lower()
        assert len(error["details"]) < 1000


def test_false_sizes_of_an_update_are_refused(siege: Siege, device: Device) -> None:
    _, encoded = rejoin_for_task(device).encode()
    with siege.borne():
        for size in (2**63, 2**64 - 1, 10**12):
            with refused(Code.RESOURCE_EXHAUSTED) as error:
                device.open(encoded, size_bytes=size)
            assert f"declared {size} bytes" in error["details"]
        report = pb.TrainReport(samples=1, loss_before=1, loss_after=1, cut_by=["x" * 1000] * 1000)
        with refused(Code.INVALID_ARGUMENT) as error:
            device.open(encoded, report=report)
        with refused(Code.INVALID_ARGUMENT):
            device.open(encoded, codec="topk:" + "1" * 2_000_000)
        with refused(Code.INVALID_ARGUMENT):
            device.open(encoded, digest=bytes(3_000_000))
    assert siege.refused("upload_bytes") >= 3


def attempt(device: Device, codec: str, messages: list[bytes]) -> Any:
    """Send an invalid update until it is examined within its round; return the error."""
    for _ in range(20):
        rejoin_for_task(device, codecs=["raw32", "zstd"])
        _, encoded = device.encode()
        try:
            device.send_raw(device.open(encoded, codec=codec).upload, messages)
        except grpc.RpcError as error:
            if error.code() is not Code.FAILED_PRECONDITION:
                return error
            time.sleep(0.05)
    raise AssertionError("the round went on every time")


def chunk(data: bytes, elements: int) -> bytes:
    return Chunk(
        data=data, checksum=xxh3_128_digest(data), section=1, elements=elements
    ).SerializeToString()


def test_decompression_bombs_in_an_update_are_refused(siege: Siege) -> None:
    """The client's tasks name this codec, see `Siege`."""
    device = Device(siege.address, "packer")
    bomb = zstandard.ZstdCompressor(level=1).compress(bytes(512 * MIB))
    assert len(bomb) < MIB
    hidden = zstandard.ZstdCompressor(level=3, write_content_size=False).compress(bytes(64 * MIB))
    with siege.borne():
        for data in (bomb, hidden):
            error = attempt(device, "raw32+zstd", [chunk(data, 262_144)])
            assert error.code() is Code.INVALID_ARGUMENT
            assert "zstd frame declares" in error.details()
    device.channel.close()


@pytest.mark.slow
@pytest.mark.parametrize(("encoding", "wbits"), [("gzip", 31), ("deflate", 15)])
def test_a_decompression_bomb_in_grpc_compression_is_refused(
    siege: Siege, encoding: str, wbits: int
) -> None:
    """gRPC would decompress to a thousand times the size before comparing it with any limit."""
    packer = zlib.compressobj(9, zlib.DEFLATED, wbits)
    bomb = b"".join([*(packer.compress(bytes(MIB)) for _ in range(60)), packer.flush()])
    assert len(bomb) < 65_000, "the window of a new connection"
    with siege.borne():
        wire = Wire(siege.port)
        headers = request("/fairfleet.v1.Fleet/Join", ("grpc-encoding", encoding))
        body = b"\1" + struct.pack(">I", len(bomb)) + bomb
        wire.send(frame(HEADERS, END_HEADERS, 1, headers))
        for start in range(0, len(body), 16_384):
            wire.send(frame(DATA, 0, 1, body[start : start + 16_384]))
        wire.send(frame(DATA, END_STREAM, 1))
        assert status_of(wire) in (Code.UNIMPLEMENTED.value[0], Code.INVALID_ARGUMENT.value[0])
        wire.close()


def status_of(wire: Wire) -> int:
    """Return the status of the only call on a connection."""
    decoder = Decoder()
    for received in wire.frames():
        if isinstance(received, HeadersFrame):
            headers = dict(decoder.decode(received.data))
            if "grpc-status" in headers:
                return int(headers["grpc-status"])
    raise AssertionError("hung up without a status")


@pytest.mark.slow
def test_chunks_of_unknown_fields_are_refused(siege: Siege, device: Device) -> None:
    with siege.borne():
        error = attempt(device, "raw32", [b"\x38\x01" * 400_000] * 3)
        assert error.code() is Code.INVALID_ARGUMENT
        assert "more than 64 fields" in error.details()


@pytest.mark.slow
def test_a_chunk_larger_than_any_message_is_refused(siege: Siege, device: Device) -> None:
    with siege.borne():
        assert attempt(device, "raw32", [bytes(6 * MIB)]).code() is Code.RESOURCE_EXHAUSTED
