"""Uploads that are opened and not sent, sent too slowly, or too many at once."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import grpc
import pytest

from fairfleet.common.chunk_stream import EncodedStream, xxh3_128_digest
from fairfleet.proto.v1.model_pb2 import Chunk
from tests.support.attacks.siege import MIB, Siege, refused, rejoin_for_task
from tests.support.device import Device

Code = grpc.StatusCode


@pytest.mark.slow
def test_unsent_uploads_use_no_memory(siege: Siege, device: Device) -> None:
    """Of 200 announcements of different updates, the server stores one and allocates nothing."""
    _, encoded = rejoin_for_task(device).encode()
    with siege.borne():
        for number in range(200):
            if not opens(device, encoded, number):
                rejoin_for_task(device)  # the round continued


def opens(device: Device, encoded: EncodedStream, number: int) -> bool:
    try:
        device.open(encoded, digest=number.to_bytes(32, "big"), size_bytes=2 * MIB)
    except grpc.RpcError as error:
        if error.code() is not Code.FAILED_PRECONDITION:
            raise
        return False
    return True


@pytest.mark.slow
def test_an_upload_that_sends_nothing_is_ended(siege: Siege, device: Device) -> None:
    release = threading.Event()

    def nothing() -> Iterator[Chunk]:
        release.wait(30)
        yield from ()

    _, encoded = rejoin_for_task(device).encode()
    with siege.borne(), refused(Code.DEADLINE_EXCEEDED) as error:
        device.send(device.open(encoded).upload, nothing())
    release.set()
    assert "too little came within 2 s" in error["details"]
    assert siege.refused("slow_upload") >= 1


@pytest.mark.slow
def test_an_upload_that_is_too_slow_is_ended_too(siege: Siege, device: Device) -> None:
    """A value now and then holds no place: 2.4 MB may take 2 + 2 times as long as one chunk."""
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

    _, encoded = rejoin_for_task(device).encode()
    with siege.borne(), refused(Code.DEADLINE_EXCEEDED, Code.FAILED_PRECONDITION):
        device.send(device.open(encoded).upload, drops())
    ended.set()


@pytest.mark.slow
def test_simultaneous_uploads_of_a_client_are_limited(siege: Siege, device: Device) -> None:
    release = threading.Event()

    def nothing() -> Iterator[Chunk]:
        release.wait(30)
        yield from ()

    _, encoded = rejoin_for_task(device).encode()
    metadata = (("fairfleet-upload-bin", device.open(encoded).upload),)
    with siege.borne():
        calls = [device.stub.SendUpload.future(nothing(), metadata=metadata) for _ in range(40)]
        codes = [call.code() for call in calls]
        release.set()
    assert set(codes) <= {Code.RESOURCE_EXHAUSTED, Code.DEADLINE_EXCEEDED, Code.FAILED_PRECONDITION}
    assert codes.count(Code.RESOURCE_EXHAUSTED) >= 30
    assert siege.refused("uploads") >= 30
