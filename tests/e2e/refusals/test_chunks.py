"""Streams of chunks that are damaged, out of order, too long, or not finite."""

from __future__ import annotations

from collections.abc import Callable

import grpc
import pytest

from fairfleet.common.chunk_stream import xxh3_128_digest
from fairfleet.proto.v1 import fleet_pb2 as pb
from fairfleet.proto.v1.model_pb2 import SECTION_BUFFERS, Chunk
from tests.support.altered_chunks import flip_one_bit, send_altered
from tests.support.device import Device
from tests.support.refusals import refused

Code = grpc.StatusCode


def test_after_a_corrupted_chunk_the_upload_resumes_at_that_chunk(device: Device) -> None:
    with refused(Code.DATA_LOSS, "does not match its checksum", "update of device"):
        send_altered(device, flip_one_bit)
    chunks, encoded = device.encode()
    opened = device.open(encoded)
    assert opened.offset_bytes == chunks[1].offset_bytes  # the chunk before it is kept
    rest = [chunk for chunk in chunks if chunk.offset_bytes >= opened.offset_bytes]
    assert device.send(opened.upload, rest).outcome == pb.OUTCOME_COUNTED


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda checksum: checksum[:8], "has 8 bytes; expected 16 bytes, XXH3-128"),
        (lambda checksum: b"", "has 0 bytes; expected 16 bytes"),
        (
            lambda checksum: checksum[::-1],
            "is in another byte order; expected 16 bytes, XXH3-128 in canonical",
        ),
        (lambda checksum: checksum[8:] + checksum[:8], "is in another byte order"),
    ],
)
def test_a_checksum_of_the_wrong_form_is_refused_with_the_right_one(
    device: Device, change: Callable[[bytes], bytes], message: str
) -> None:
    def changed(chunks: list[Chunk]) -> list[Chunk]:
        chunks[0].checksum = change(chunks[0].checksum)
        return chunks

    with refused(Code.INVALID_ARGUMENT, message, "FORMAT.md"):
        send_altered(device, changed)


def test_a_chunk_after_the_last_element_is_refused(device: Device) -> None:
    def longer(chunks: list[Chunk]) -> list[Chunk]:
        end, data = chunks[-1].offset_bytes + len(chunks[-1].data), bytes(8)
        more = Chunk(
            offset_bytes=end, data=data, checksum=xxh3_128_digest(data), section=3, elements=1
        )
        return [*chunks, more]

    with refused(
        Code.INVALID_ARGUMENT,
        "comes after the model's last element",
        "expected the end of the stream",
    ):
        send_altered(device, longer)


def test_a_reordered_stream_is_refused(device: Device) -> None:
    with refused(Code.OUT_OF_RANGE, "not the one that follows; expected byte 0"):
        send_altered(device, lambda chunks: [chunks[1], chunks[0], *chunks[2:]])


def test_a_truncated_stream_is_refused(device: Device) -> None:
    with refused(Code.OUT_OF_RANGE, "the stream ended after"):
        send_altered(device, lambda chunks: chunks[:-1])


def test_a_stream_with_a_missing_chunk_is_refused(device: Device) -> None:
    with refused(Code.OUT_OF_RANGE, "not the one that follows"):
        send_altered(device, lambda chunks: [chunks[0], *chunks[2:]])


def test_more_bytes_than_announced_are_refused(device: Device) -> None:
    with refused(Code.INVALID_ARGUMENT, "1048576 bytes came", "100 were announced"):
        send_altered(device, lambda chunks: chunks, size_bytes=100)


def test_a_stream_with_another_digest_than_announced_is_refused(device: Device) -> None:
    with refused(Code.DATA_LOSS, "announced was 0000000000000000"):
        send_altered(device, lambda chunks: chunks, digest=bytes(32))
    _, encoded = device.encode()
    assert device.open(encoded, digest=bytes(32)).offset_bytes == 0  # the upload begins again


def enlarge_first_chunk(chunks: list[Chunk]) -> list[Chunk]:
    """Replace the first chunk by one that is 4 bytes over the limit."""
    data = bytes((1 << 20) + 4)
    chunks[0].MergeFrom(Chunk(data=data, checksum=xxh3_128_digest(data), elements=len(data) // 4))
    return chunks


def test_a_chunk_over_the_size_limit_is_refused(device: Device) -> None:
    with refused(Code.INVALID_ARGUMENT, "carries 1048580 bytes; at most 1048576"):
        send_altered(device, enlarge_first_chunk)


def declare_one_element_more(chunks: list[Chunk]) -> list[Chunk]:
    """Let the first chunk declare an element that it does not have."""
    chunks[0].elements += 1
    return chunks


def declare_too_many_elements(chunks: list[Chunk]) -> list[Chunk]:
    """Let the first chunk declare 2**31 elements."""
    chunks[0].elements = 2**31
    return chunks


def change_section(chunks: list[Chunk]) -> list[Chunk]:
    """Put the first chunk into another section."""
    chunks[0].section = SECTION_BUFFERS
    return chunks


def prepend_empty_chunk(chunks: list[Chunk]) -> list[Chunk]:
    """Insert a chunk without elements before the first."""
    return [Chunk(section=1, checksum=xxh3_128_digest(b"")), *chunks]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (declare_one_element_more, "values in raw32 take"),
        (declare_too_many_elements, "declares 2147483648 elements"),
        (change_section, "expected element 0 of parameters"),
        (prepend_empty_chunk, "declares 0 elements"),
    ],
)
def test_a_chunk_with_a_false_description_is_refused(
    device: Device, change: Callable[[list[Chunk]], list[Chunk]], message: str
) -> None:
    with refused(Code.INVALID_ARGUMENT, message):
        send_altered(device, change)


def test_bytes_that_are_not_a_message_are_refused(device: Device) -> None:
    _, encoded = device.encode()
    with refused(Code.INVALID_ARGUMENT, "not a Chunk message"):
        device.send_raw(device.open(encoded).upload, [b"\xff\xff\xff\xff"])


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_value_that_is_not_finite_is_refused_with_its_tensor(
    device: Device, value: float
) -> None:
    chunks, encoded = device.encode(value)
    with refused(Code.INVALID_ARGUMENT, "element 0 of tensor weight is", "not a finite number"):
        device.send(device.open(encoded).upload, chunks)
