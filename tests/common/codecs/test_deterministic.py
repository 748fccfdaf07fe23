"""Deterministic codecs: rounding again changes no bit, and every receiver decodes the bytes."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from fairfleet.common.codecs import STEADY, codec_named, is_exact, round_to, steady_codec
from fairfleet.common.errors import BadRequest
from fairfleet.common.tensors import Vector
from tests.support.paths import ROOT

VECTORS = json.loads((ROOT / "proto" / "vectors" / "codecs.json").read_text())["steady"]
finite = st.floats(width=32, allow_nan=False, allow_infinity=False)
values_of = arrays(
    np.float32, st.integers(1, 700), elements=st.one_of(st.floats(-1, 1, width=32), finite)
)


def rounded(name: str, values: Vector) -> Vector:
    out = values.copy()
    round_to(steady_codec(name), out)
    return out


@pytest.mark.parametrize("name", STEADY)
@settings(max_examples=60)
@given(values=values_of)
@example(values=np.array([127, 63.5, 1], np.float32))
@example(values=np.array([63.50001, -0.0], np.float32))
@example(values=np.array([2.0**-100, 2.0**-101], np.float32))
@example(values=np.array([127.49, 127.5, 128], np.float32))
def test_rounded_values_are_encoded_without_loss_and_to_the_same_bytes(
    name: str, values: Vector
) -> None:
    codec, once = steady_codec(name), rounded(name, values)
    assert is_exact(codec, once)
    assert rounded(name, once).tobytes() == once.tobytes()
    assert bytes(codec.encode(once)) == bytes(codec.encode(values))
    out = np.empty_like(once)
    codec_named(name).decode(codec.encode(once), out)  # Like any receiver.
    assert out.tobytes() == once.tobytes()


@given(values=values_of)
def test_int8_is_off_by_half_a_step_at_most(values: Vector) -> None:
    once = rounded("int8", values).astype(np.float64)
    for first in range(0, len(values), 256):
        block = np.clip(values[first : first + 256].astype(np.float64), -(2.0**126), 2.0**126)
        peak = np.abs(block).max()
        step = 2.0 ** np.ceil(np.log2(peak / 127)) if peak else 0.0
        assert (
            np.abs(once[first : first + 256] - block) <= max(step / 2 * (1 + 1e-9), 2.0**-100)
        ).all()


def test_a_model_is_rounded_the_same_in_one_piece_and_in_many() -> None:
    values = np.random.default_rng(0).standard_normal(300_001, dtype=np.float32)
    for name in STEADY:
        parts = np.concatenate(
            [rounded(name, values[first : first + 4096]) for first in range(0, len(values), 4096)]
        )
        assert parts.tobytes() == rounded(name, values).tobytes()


def test_a_model_that_was_not_rounded_is_not_exact() -> None:
    values = np.random.default_rng(0).standard_normal(5000, dtype=np.float32)
    assert not any(is_exact(codec, values) for codec in STEADY.values())
    one_bit = rounded("int8", values)
    one_bit[-1] = np.nextafter(one_bit[-1], np.float32(1))
    assert not is_exact(steady_codec("int8"), one_bit)


@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: f"{vector['codec']}, {vector['of']}")
def test_golden_vectors_of_rounding_encode_and_decode(vector: dict[str, str]) -> None:
    values = np.frombuffer(bytes.fromhex(vector["values"]), "<f4")
    assert bytes(steady_codec(vector["codec"]).encode(values)).hex() == vector["data"]
    assert rounded(vector["codec"], values).tobytes().hex() == vector["decoded"]


def test_models_are_not_rounded_to_what_is_random_or_sparse() -> None:
    for name in ("raw32", "int4", "topk:0.1", "int8+zstd", "zip"):
        with pytest.raises(BadRequest, match="no model can be rounded"):
            steady_codec(name)
