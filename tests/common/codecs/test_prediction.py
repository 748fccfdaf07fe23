"""Delta-coded updates: both sides get the same bits, and a base never makes an update worse."""

from __future__ import annotations

import json
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from fairfleet.common.chunk_stream import Decoder, encode
from fairfleet.common.codecs import CHUNK_BYTES, codec_named, is_predicted, roundtrip
from fairfleet.common.codecs.prediction import (
    BLOCK,
    decode_predicted,
    fitting_scales,
    predicted,
    scale_bytes,
)
from fairfleet.common.errors import BadRequest, NotFinite
from fairfleet.common.tensors import Model, Section, Vector
from tests.support.paths import ROOT

VECTORS = ROOT / "proto" / "vectors" / "prediction.json"
CODEC = "topk:0.1"


def drawn(seed: int, size: int = 1000) -> Vector:
    return np.random.default_rng(seed).standard_normal(size, dtype=np.float32)


def vectors(size: int = 64) -> st.SearchStrategy[Vector]:
    return arrays(np.float32, size, elements=st.floats(-1e6, 1e6, width=32, allow_subnormal=False))


def test_only_codecs_that_leave_values_out_and_have_room_are_predicted() -> None:
    names = (
        "raw32",
        "int8",
        "sign",
        "topk:0.1",
        "topk:1+zstd",
        "topk:0.436",
        "topsign:0.1",
    )  # 0.436 fills its chunks completely.
    assert [name for name in names if is_predicted(name)] == [
        "topk:0.1",
        "topk:1+zstd",
        "topsign:0.1",
    ]
    for name in ("topk:0.1", "topk:1+zstd", "topsign:0.1"):
        codec = codec_named(name)
        assert (
            codec.largest(codec.elements_per_chunk) + scale_bytes(codec.elements_per_chunk)
            <= CHUNK_BYTES
        )


@given(update=vectors(BLOCK + 40), base=vectors(BLOCK + 40))
def test_the_difference_is_never_longer_than_the_update(update: Vector, base: Vector) -> None:
    rest = update.astype(np.float64) - predicted(fitting_scales(update, base), base)
    assert np.linalg.norm(rest) <= np.linalg.norm(update.astype(np.float64)) * (1 + 1e-5) + 1e-30


@pytest.mark.parametrize("length", [1e-30, 3e-23, 1e-19, 1e19])
def test_the_difference_is_not_longer_if_squares_of_the_base_overflow_float32(
    length: float,
) -> None:
    update, base = drawn(0, BLOCK), (length * drawn(1, BLOCK)).astype(np.float32)
    rest = update - predicted(fitting_scales(update, base), base)
    assert np.linalg.norm(rest) <= np.linalg.norm(update) * (1 + 1e-5)


def test_a_similar_base_reduces_the_error() -> None:
    base = drawn(0)
    update = (0.5 * base + 0.1 * drawn(1)).astype(np.float32)
    alone, with_base = roundtrip(CODEC, update), roundtrip(CODEC, update, base=base)
    assert np.linalg.norm(with_base.decoded - update) < 0.3 * np.linalg.norm(alone.decoded - update)
    assert abs(with_base.encoded_bytes - scale_bytes(1000) - alone.encoded_bytes) < 20, (
        "the gaps' coding may differ a little"
    )


def test_every_block_has_its_own_multiple() -> None:
    base = drawn(9)
    update = base.copy()
    update[BLOCK : 2 * BLOCK] *= -3
    np.testing.assert_array_equal(predicted(fitting_scales(update, base), base), update)


def test_a_constant_update_converges_after_a_few_rounds() -> None:
    update, base = drawn(2), None
    for _ in range(12):
        base = roundtrip(CODEC, update, base=base).decoded
    np.testing.assert_allclose(base, update, rtol=1e-2, atol=1e-3)


def test_a_base_of_zeros_changes_nothing() -> None:
    update = drawn(3)
    with_base = roundtrip(CODEC, update, base=np.zeros(1000, np.float32))
    np.testing.assert_array_equal(with_base.decoded, roundtrip(CODEC, update).decoded)


@pytest.mark.parametrize("bits", [0x7FC0, 0x7F80, 0xFF80])
def test_a_multiple_that_is_not_finite_is_refused(bits: int) -> None:
    data = struct.pack("<4H", 0, 0, 0, bits) + bytes(codec_named(CODEC).encode(drawn(4)))
    with pytest.raises(BadRequest, match="multiple of the base is not a finite number"):
        decode_predicted(codec_named(CODEC), data, drawn(5), np.empty(1000, np.float32))


def test_the_stream_refuses_a_multiple_that_overflows() -> None:
    row = Model.of({"w": np.zeros(1000, np.float32)})
    rest = bytes(codec_named(CODEC).encode(drawn(4)))
    messages: list[bytes] = []
    pieces = iter([(Section.PARAMETERS, 0, 1000, struct.pack("<4H", *[0x7F70] * 4) + rest)])
    encode(pieces, lambda head, data: messages.append(b"".join((head, data))))
    with pytest.raises(NotFinite, match="tensor w is"):
        Decoder(row, codec_named(CODEC), np.full(1000, 100, np.float32)).take(messages[0])


@pytest.mark.parametrize("length", [0, 7, 8, 12])
def test_a_chunk_that_ends_before_its_values_is_refused(length: int) -> None:
    data = struct.pack("<4H", *[0x3F80] * 4) + bytes(codec_named(CODEC).encode(drawn(6)))
    with pytest.raises(BadRequest):
        decode_predicted(codec_named(CODEC), data[:length], drawn(7), np.empty(1000, np.float32))


@given(data=st.binary(max_size=200))
def test_arbitrary_bytes_are_refused_or_decoded(data: bytes) -> None:
    out = np.empty(64, np.float32)
    try:
        decode_predicted(codec_named(CODEC), data, drawn(8, 64), out)
    except BadRequest:
        return
    assert len(data) >= scale_bytes(64)


def test_the_golden_vectors_decode_to_the_same_bits() -> None:
    cases = json.loads(VECTORS.read_text(encoding="utf-8"))["cases"]
    assert cases
    for case in cases:
        base = np.array([int(word, 16) for word in case["base"]], np.uint32).view(np.float32)
        out = np.empty(len(base), np.float32)
        decode_predicted(codec_named(case["codec"]), bytes.fromhex(case["data"]), base, out)
        assert [f"{word:08x}" for word in out.view(np.uint32)] == case["decoded"]
