"""Chunks of a hostile client are refused with a reason, and cost little memory.

proto/ATTACKS.md describes these attacks.
"""

from __future__ import annotations

import random
import struct
import tracemalloc
from collections.abc import Callable

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from xxhash import xxh3_128_digest

from fairfleet.common.chunk_stream import Decoder
from fairfleet.common.codecs import CHUNK_ELEMENTS, EXAMPLES, codec_named
from fairfleet.common.errors import BadRequest
from fairfleet.common.tensors import Model, Vector
from fairfleet.proto.v1.model_pb2 import Chunk

NAMES = (*EXAMPLES, "topsign:0.5", "topk:0.5", "topk:1", "raw32+zstd", "sign+zstd", "topk:0.5+zstd")
MEMORY_BYTES = 32 << 20  # that decoding one chunk may take in addition to the row


def encoded(name: str, elements: int = 300) -> bytes:
    values = np.random.default_rng(0).standard_normal(elements, dtype=np.float32)
    return bytes(codec_named(name).encode(values))


def refuse(name: str, data: bytes, elements: int, reason: str) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(BadRequest, match=reason):
            codec_named(name).decode(data, np.empty(elements, np.float32))
        assert tracemalloc.get_traced_memory()[1] < MEMORY_BYTES
    finally:
        tracemalloc.stop()


def topk(form: int, count: int, positions: bytes, values: int | None = None) -> bytes:
    return (
        struct.pack("<BI", form, count)
        + b"\x80\x3f" * (count if values is None else values)
        + positions
    )


# ---- lengths -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["raw32", "fp16", "bf16", "int8", "int4", "sign"])
@pytest.mark.parametrize(
    "change", [lambda d: d[:-1], lambda d: d + b"\0", lambda d: b"", lambda d: d[:4]]
)
def test_truncated_and_lengthened_data_is_refused(
    name: str, change: Callable[[bytes], bytes]
) -> None:
    refuse(name, change(encoded(name)), 300, "300 values in .* take .* bytes; the chunk has")


def test_a_chunk_that_declares_too_many_elements_is_refused() -> None:
    data = b"\0" * 5
    message = Chunk(
        checksum=xxh3_128_digest(data),
        section=1,
        first_element=0,
        elements=CHUNK_ELEMENTS + 1,
        data=data,
    ).SerializeToString()
    decoder = Decoder(
        Model.of({"w": np.zeros(CHUNK_ELEMENTS + 5, np.float32)}), codec_named("topk:0.01")
    )
    with pytest.raises(BadRequest, match="declares 1048577 elements; it may have 1 to 1048576"):
        decoder.take(message)


@pytest.mark.parametrize(
    ("name", "last"), [("int4", 5), ("sign", 4), ("topsign:0.01", 4)]
)  # byte with bits
def test_nonzero_bits_beyond_the_last_value_are_refused(name: str, last: int) -> None:
    data = bytearray(encoded(name, 3))
    data[last] |= 0x80
    refuse(name, bytes(data), 3, "unused")


def topsign(codes: bytes, values: int, scale: float = 1.0) -> bytes:
    return struct.pack("<f", scale) + codes + b"\x80\x3f" * values


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (topsign(b"\xff\x00", 3), "names 4 and has 6 bytes"),
        (topsign(b"\xff\x00", 5), "names 4 and has 10 bytes"),
        (topsign(b"\xff\x03", 5), "keeps at most 4 of 8 values.*names 5"),
        (topsign(b"\x00\x00", 1), "names 0 and has 2 bytes"),
        (topsign(b"\x00\x00", 0) + b"\x00", "names 0 and has 1 bytes"),
        (topsign(b"\x00", 0), "begin with 6 bytes; the chunk has 5"),
        (b"", "begin with 6 bytes; the chunk has 0"),
    ],
)
def test_too_many_or_missing_exact_values_of_topsign_are_refused(data: bytes, reason: str) -> None:
    refuse("topsign:0.5", data, 8, reason)


# ---- scales ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["int8", "int4", "sign", "topsign:0.1"])
@pytest.mark.parametrize("scale", [np.nan, np.inf, -np.inf, -1.0, -0.0, 3e38])
def test_an_invalid_scale_is_refused(name: str, scale: float) -> None:
    data = struct.pack("<f", scale) + encoded(name)[4:]
    refuse(name, data, 300, "the scale of .* block 0 is")


@pytest.mark.parametrize("name", ["int8", "int4", "sign", "topsign:0.01"])
@pytest.mark.parametrize("power", range(100, 128))
def test_no_accepted_scale_makes_a_product_overflow(name: str, power: int) -> None:
    scale = struct.pack("<f", 2.0**power)
    for byte in (b"\x00", b"\x7f", b"\x80", b"\xaa", b"\xff"):
        error_or_tensor(name, scale + byte * (codec_named(name).largest(8) - 4), 8)


# ---- positions ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (topk(0, 1, bytes([100])), "lead to element 101; it has 100"),
        (topk(0, 2, bytes([99, 0])), "lead to element 101; it has 100"),
        (topk(0, 1, bytes([255, 3])), "lead to element 259; it has 100"),
        (topk(0, 1, bytes([3, 255])), "lead to element"),
        (topk(0, 0, bytes([255] * 14)), "take 14 bytes; a bitmap would take 13"),
        (topk(0, 2, bytes([3])), "declares 2 values; it names 1 positions"),
        (topk(0, 1, bytes([3, 4])), "declares 1 values; it names 2 positions"),
        (topk(1, 1, bytes(12) + b"\x10"), "does not end at element 100"),
        (topk(1, 1, b"\x01" + bytes(11)), "has 12 bytes"),
        (topk(1, 2, b"\x01" + bytes(12)), "declares 2 values; it names 1 positions"),
        (topk(2, 1, b"\x01"), "form 2"),
        (topk(0, 51, b"\0" * 5), "keeps at most 50 of 100"),
        (topk(0, 2**32 - 1, b"", values=0), "declares 4294967295 values"),
        (topk(0, 9, b"", values=1), "declares 9 values"),
        (b"\0\0\0", "take 5 to 118 bytes"),
        (topk(0, 50, bytes(50)), "the chunk has"),
    ],
)
def test_wrong_positions_or_counts_are_refused(data: bytes, reason: str) -> None:
    refuse("topk:0.5", data, 100, reason)


@given(st.binary(max_size=13))
def test_no_position_can_be_named_twice(coded: bytes) -> None:
    """A gap moves forward by at least one, and a bit has one place, so no duplicate is possible."""
    count = sum(byte != 255 for byte in coded)
    out = np.zeros(3400, np.float32)
    try:
        codec_named("topk:0.5").decode(topk(0, count, coded), out)
    except BadRequest:
        return
    assert np.count_nonzero(out) == count


def test_the_stream_refuses_an_infinite_value() -> None:
    data = struct.pack("<BI", 0, 1) + b"\x80\x7f" + b"\x00"
    message = Chunk(
        checksum=xxh3_128_digest(data), section=1, elements=8, data=data
    ).SerializeToString()
    decoder = Decoder(Model.of({"w": np.zeros(8, np.float32)}), codec_named("topk:0.5"))
    with pytest.raises(BadRequest, match="element 0 of tensor w is inf"):
        decoder.take(message)


# ---- decompression -----------------------------------------------------------------------------


def test_a_decompression_bomb_is_refused() -> None:
    bomb = zstandard.ZstdCompressor().compress(bytes(1 << 30))
    assert len(bomb) < 1 << 20
    refuse("int8+zstd", bomb, CHUNK_ELEMENTS, "declares 1073741824 bytes")


def test_a_bomb_without_declared_size_is_refused() -> None:
    bomb = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(100 << 20))
    refuse("int8+zstd", bomb, CHUNK_ELEMENTS, "declares 18446744073709551615 bytes")


def test_a_bomb_that_declares_too_small_a_size_is_refused() -> None:
    bomb = bytearray(zstandard.ZstdCompressor().compress(bytes(50 << 20)))
    assert zstandard.frame_header_size(bomb) >= 6
    size = struct.pack("<I", 304)
    position = bytes(bomb).index(struct.pack("<I", 50 << 20))
    bomb[position : position + 4] = size
    refuse("int8+zstd", bytes(bomb), 300, "not a zstd frame")


def test_a_frame_that_declares_too_large_a_size_is_refused() -> None:
    frame = zstandard.ZstdCompressor().compress(bytes(1 << 20))
    position = frame.index(struct.pack("<I", 1 << 20))
    lie = frame[:position] + struct.pack("<I", (1 << 20) + 4096) + frame[position + 4 :]
    refuse("int8+zstd", lie, CHUNK_ELEMENTS, "not a zstd frame|take .* bytes")


@pytest.mark.parametrize(
    "data", [b"", b"\x28\xb5\x2f\xfd", b"not a frame at all", b"\x50\x2a\x4d\x18\x04\0\0\0aaaa"]
)
def test_data_that_is_not_a_frame_is_refused(data: bytes) -> None:
    refuse("int8+zstd", data, 300, "zstd frame|take 308 bytes")


def test_a_second_frame_is_refused() -> None:
    refuse("int8+zstd", encoded("int8+zstd") * 2, 300, "not a zstd frame")


def test_a_frame_with_the_wrong_number_of_bytes_is_refused() -> None:
    short = zstandard.ZstdCompressor().compress(encoded("int8")[:-1])
    refuse("int8+zstd", short, 300, "300 values in int8 take 308 bytes; the chunk has 307")


# ---- anything ----------------------------------------------------------------------------------


def error_or_tensor(name: str, data: bytes, elements: int) -> bool:
    """Return whether the bytes were decoded.

    Codecs with scales guarantee finite values; for the others, the stream checks them.
    """
    out: Vector = np.full(elements, np.float32(123.25))
    tracemalloc.reset_peak()
    before = tracemalloc.get_traced_memory()[0]
    try:
        codec_named(name).decode(data, out)
    except BadRequest:
        return False
    finally:
        assert tracemalloc.get_traced_memory()[1] - before < MEMORY_BYTES
    assert np.isfinite(out).all() or not name.startswith(("int", "sign"))
    return True


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=50)
@given(data=st.binary(max_size=400), elements=st.integers(1, 300))
def test_arbitrary_bytes_are_refused_or_decoded(name: str, data: bytes, elements: int) -> None:
    tracemalloc.start()
    try:
        error_or_tensor(name, data, elements)
    finally:
        tracemalloc.stop()


def mutated(draw: random.Random, data: bytes) -> bytes:
    changed = bytearray(data)
    for _ in range(draw.randint(1, 4)):
        position = draw.randrange(len(changed) + 1)
        match draw.randrange(5):
            case 0:
                changed[position : position + 1] = bytes([draw.randrange(256)])
            case 1:
                del changed[position : position + draw.randint(1, 40)]
            case 2:
                changed[position:position] = draw.randbytes(draw.randint(1, 40))
            case 3:
                changed[position : position + 4] = draw.choice(
                    [b"\xff\xff\xff\xff", b"\0\0\xc0\x7f", b"\0\0\x80\xff", bytes(4)]
                )
            case _:
                changed[position:position] = changed[draw.randrange(len(changed) + 1) :][:40]
    return bytes(changed)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_fuzz_mutated_encodings_are_refused_or_decoded(name: str) -> None:
    draw = random.Random(name)
    tracemalloc.start()
    try:
        for _ in range(20_000):
            elements = draw.choice([1, 7, 64, 256, 300, 1000])
            lie = draw.choice(
                [elements, elements, elements + 1, CHUNK_ELEMENTS if draw.random() < 0.02 else 8]
            )
            error_or_tensor(name, mutated(draw, encoded(name, elements)), lie)
    finally:
        tracemalloc.stop()
