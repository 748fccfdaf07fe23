"""Codecs keep their error bounds, and random rounding is unbiased."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from fairfleet.common.codecs import (
    ABILITIES,
    CHUNK_BYTES,
    EXAMPLES,
    agree,
    codec_named,
    needs,
    roundtrip,
    uses_error_feedback,
)
from fairfleet.common.codecs.quantized import FRACTION, quantize
from fairfleet.common.errors import BadRequest, WrongState
from fairfleet.common.tensors import Vector
from tests.support.paths import ROOT

ALL = (
    *EXAMPLES,
    "topk:0.1",
    "topk:0.5",
    "topk:1",
    "topsign:0.01",
    "topsign:1",
    "raw32+zstd",
    "bf16+zstd",
    "sign+zstd",
)
ALL = (*ALL, "topk:0.01+zstd", "topsign:0.1+zstd")
VECTORS = json.loads((ROOT / "proto" / "vectors" / "codecs.json").read_text())["vectors"]

finite = st.floats(width=32, allow_nan=False, allow_infinity=False)
usual = st.floats(-1, 1, width=32)
values_of = arrays(np.float32, st.integers(1, 700), elements=st.one_of(usual, finite))


def through(name: str, values: Vector, seed: int = 0) -> Vector:
    out = np.full(len(values), np.nan, np.float32)
    codec_named(name).decode(codec_named(name).encode(values, (seed,)), out)
    return out


def blocks_of(values: Vector, block: int) -> Any:
    """Return the largest magnitude in the block of each value."""
    starts = np.arange(0, len(values), block)
    peaks = np.maximum.reduceat(np.abs(values.astype(np.float64)), starts)
    return np.repeat(peaks, block)[: len(values)]


def bound(name: str, values: Vector) -> Any:
    """Return the error bound of each decoded value by FORMAT.md, in float64."""
    exact = np.abs(values.astype(np.float64))
    match name.removesuffix("+zstd").partition(":")[0]:
        case "raw32":
            return np.zeros(len(values))
        case "fp16":
            return np.maximum(exact * 2.0**-11 + 2.0**-25, exact - 65504)
        case "bf16":
            return exact * 2.0**-8 + 2.0**-134
        case "int8":
            return np.maximum(blocks_of(values, 256) / 126.99 + 127 * 2.0**-100, exact - 2.0**126)
        case "int4":
            return np.maximum(blocks_of(values, 64) / 6.99 + 7 * 2.0**-100, exact - 2.0**126)
        case "sign":
            return blocks_of(values, 256) * (1 + 1e-6)
        case "topk":
            return exact  # No error is larger than that of a value that is left out.
        case "topsign":
            return np.maximum(exact * 2.0**-8, largest_left_out(name, values)) + 2.0**-134
    raise AssertionError(name)


def largest_left_out(name: str, values: Vector) -> Any:
    """Return for each value the largest magnitude in its block that topk does not keep."""
    share = float(name.removesuffix("+zstd").partition(":")[2])
    rest = values.copy()
    rest[np.argsort(-np.abs(values), kind="stable")[: int(np.ceil(share * len(values)))]] = 0
    return blocks_of(rest, 256) * (1 + 1e-6)


@pytest.mark.parametrize("name", ALL)
@settings(max_examples=40)
@given(values=values_of, seed=st.integers(0, 2**32))
def test_decoded_values_are_within_the_stated_bound(name: str, values: Vector, seed: int) -> None:
    decoded = through(name, values, seed)
    assert np.isfinite(decoded).all()
    assert (np.abs(decoded.astype(np.float64) - values) <= bound(name, values)).all()


@pytest.mark.parametrize("name", ALL)
@settings(max_examples=40)
@given(values=values_of)
def test_encoding_again_what_was_decoded_loses_no_more_than_the_bound(
    name: str, values: Vector
) -> None:
    once = through(name, values)
    assert (np.abs(through(name, once, 1).astype(np.float64) - once) <= bound(name, once)).all()


@pytest.mark.parametrize("name", ALL)
@settings(max_examples=40)
@given(values=values_of)
def test_no_encoding_is_larger_than_its_codec_says(name: str, values: Vector) -> None:
    codec = codec_named(name)
    assert len(codec.encode(values)) <= codec.largest(len(values))
    assert codec.largest(codec.elements_per_chunk) <= CHUNK_BYTES


@pytest.mark.parametrize("name", ALL)
def test_a_full_chunk_of_noise_fits_and_decodes(name: str) -> None:
    codec = codec_named(name)
    values = np.random.default_rng(0).standard_normal(codec.elements_per_chunk, dtype=np.float32)
    assert len(codec.encode(values)) <= CHUNK_BYTES
    assert (np.abs(through(name, values) - values) <= bound(name, values)).all()


class EveryDither:
    """Replaces the random generator: it yields each of the 65536 dithers once, then zeros."""

    def random_raw(self, words: int) -> Any:
        dithers = np.zeros(4 * words, np.uint16)
        dithers[:FRACTION] = np.arange(FRACTION)
        return dithers.view(np.uint64)


@pytest.mark.parametrize("levels", [127, 7])
@settings(max_examples=40)
@given(share=st.floats(-1, 1, width=32), peak=st.floats(2.0**-60, 2.0**60, width=32))
def test_the_mean_over_all_dithers_is_the_value_itself(
    levels: int, share: float, peak: float
) -> None:
    value = np.float32(share) * np.float32(peak)
    row = np.full(FRACTION + 4, value, np.float32)
    row[FRACTION:] = peak
    rounded, scales = quantize(
        row[None, :], levels, EveryDither(), np.empty((1, len(row)), np.float32)
    )  # type: ignore[arg-type]
    mean = rounded[0, :FRACTION].mean(dtype=np.float64) * float(scales[0])
    assert abs(mean - float(value)) <= float(scales[0]) * 2.0**-16 + abs(value) * 2.0**-22


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_over_many_seeds_the_errors_cancel(name: str) -> None:
    values = np.random.default_rng(3).standard_normal(256, dtype=np.float32)
    repeats = 2000
    mean = np.mean(
        [through(name, values, seed) for seed in range(repeats)], axis=0, dtype=np.float64
    )
    spread = (
        bound(name, values) / 2 / np.sqrt(repeats)
    )  # The largest deviation of a mean of outcomes that are one step apart.
    assert (np.abs(mean - values) <= 5 * spread).all()


@pytest.mark.parametrize("name", ALL)
def test_the_same_seed_gives_the_same_bytes(name: str) -> None:
    values = np.random.default_rng(1).standard_normal(1000, dtype=np.float32)
    assert bytes(codec_named(name).encode(values, (5, 0))) == bytes(
        codec_named(name).encode(values, (5, 0))
    )
    if name.startswith("int"):
        assert bytes(codec_named(name).encode(values, (5, 0))) != bytes(
            codec_named(name).encode(values, (6, 0))
        )


@given(values=values_of, share=st.sampled_from(["0.01", "0.1", "0.5", "1"]))
def test_topk_keeps_the_requested_number_of_largest_values(values: Vector, share: str) -> None:
    decoded = through(f"topk:{share}", values)
    is_sent = decoded != 0
    expected = min(int(np.ceil(float(share) * len(values))), np.count_nonzero(values))
    lost = np.count_nonzero(
        (decoded == 0) & (np.abs(values) > 0) & (np.abs(values) < 2.0**-133)
    )  # The difference is too small for bf16.
    assert expected - lost <= np.count_nonzero(is_sent) <= expected
    if is_sent.any() and not lost:
        assert np.abs(values[~is_sent]).max(initial=0) <= np.abs(values[is_sent]).min()


@given(values=values_of, share=st.sampled_from(["0.01", "0.1", "0.5", "1"]))
def test_topsign_has_the_values_of_topk_and_one_magnitude_for_the_others_of_a_block(
    values: Vector, share: str
) -> None:
    decoded, topk = through(f"topsign:{share}", values), through(f"topk:{share}", values)
    np.testing.assert_array_equal(decoded[topk != 0], topk[topk != 0])
    others = (topk == 0) & (decoded != 0)
    assert (np.sign(decoded[others]) == np.sign(values[others])).all()
    for first in range(0, len(values), 256):
        block = slice(first, first + 256)
        assert len(np.unique(np.abs(decoded[block][others[block]]))) <= 1


def test_topsign_keeps_zeros_as_zeros() -> None:
    values = np.random.default_rng(6).standard_normal(5000, dtype=np.float32)
    values[::3] = 0
    assert not through("topsign:0.1", values)[::3].any()


def test_topsign_loses_half_as_much_as_topk_and_less_than_int4_of_an_update_with_a_long_tail() -> (
    None
):
    values = np.random.default_rng(5).standard_t(3, 100_000).astype(np.float32)
    lost = {
        name: np.linalg.norm(through(name, values) - values)
        for name in ("topk:0.1", "topsign:0.1", "int4")
    }
    assert lost["topsign:0.1"] < 0.5 * lost["topk:0.1"]
    assert lost["topsign:0.1"] < lost["int4"]


@pytest.mark.parametrize("share", [0.001, 0.01, 0.1, 0.2, 0.5])
def test_topk_writes_its_positions_the_shorter_way(share: float) -> None:
    values = np.random.default_rng(2).standard_normal(100_000, dtype=np.float32)
    positions = (
        len(codec_named(f"topk:{share}").encode(values)) - 5 - 2 * int(np.ceil(share * len(values)))
    )
    assert positions <= min(len(values) / 8, 1.1 * share * len(values) + len(values) / 255) + 1


def mean_errors(name: str, seeds: int) -> tuple[Any, Any]:
    """Return the mean error of each decoded value over the seeds, and the largest standard error.

    Each standard error by itself says too little: a value near a level is rarely rounded away.
    """
    values = np.random.default_rng(5).standard_normal(1024, dtype=np.float32)
    errors = np.array([through(name, values, seed).astype(np.float64) - values
                       for seed in range(seeds)])  # fmt: skip
    return errors.mean(axis=0), errors.std(axis=0).max() / np.sqrt(seeds)


@pytest.mark.parametrize("name", ALL)
def test_a_codec_says_rightly_whether_it_is_unbiased(name: str) -> None:
    mean, deviation = mean_errors(name, seeds=600)
    # A thousand values within five standard errors, and the dither's 2^-17 of a step.
    is_unbiased = bool((np.abs(mean) <= 5 * deviation + 2.0**-16).all())
    assert codec_named(name).is_unbiased == is_unbiased


@pytest.mark.parametrize("name", ALL)
def test_error_feedback_is_automatic_where_a_codec_is_biased(name: str) -> None:
    codec = codec_named(name)
    assert uses_error_feedback("auto", name) == (not codec.is_unbiased or not codec.lossy)
    assert uses_error_feedback(True, name)
    assert not uses_error_feedback(False, name)


@pytest.mark.parametrize("name", [name for name in ALL if codec_named(name).lossy])
def test_with_error_feedback_what_arrives_adds_up_to_the_truth(name: str) -> None:
    draw = np.random.default_rng(4)
    residual, arrived, truth = np.zeros(3000, np.float32), np.zeros(3000), np.zeros(3000)
    for round_number in range(50):
        update = draw.standard_normal(3000, dtype=np.float32)
        sent = roundtrip(name, update + residual, round_number).decoded
        residual = update + residual - sent
        arrived, truth = arrived + sent, truth + update
    np.testing.assert_allclose(arrived + residual, truth, atol=2e-3)


@pytest.mark.parametrize(
    "vector", VECTORS, ids=lambda vector: f"{vector['codec']} of {vector['of']}"
)
def test_golden_vectors_decode_to_the_same_bits(vector: dict[str, str]) -> None:
    codec, values = (
        codec_named(vector["codec"]),
        np.frombuffer(bytes.fromhex(vector["values"]), "<f4"),
    )
    out = np.empty(len(values), np.float32)
    codec.decode(bytes.fromhex(vector["data"]), out)
    assert out.tobytes().hex() == vector["decoded"]
    if not vector["codec"].endswith("+zstd"):  # Another version of zstd may compress better.
        assert bytes(codec.encode(values, (7,))).hex() == vector["data"]


def test_the_bars_for_size_hold() -> None:
    values = np.random.default_rng(0).standard_normal(1 << 20, dtype=np.float32)
    assert roundtrip("int8", values).encoded_bytes <= 0.26 * values.nbytes
    assert roundtrip("topk:0.01", values).encoded_bytes <= 0.02 * values.nbytes
    assert roundtrip("topsign:0.1", values).encoded_bytes <= 0.117 * values.nbytes


@pytest.mark.parametrize(
    "name", ["zip", "", "topk", "topk:", "topk:0", "topk:0.0", "topk:2", "topk:1e-3",
             "topk:nan", "topsign",
             "topsign:0", "raw32:1", "int8+", "int8+gzip",
             "int8+zstd+zstd", "+zstd", "INT8", "topk:0.0000000001", " int8"],
)  # fmt: skip
def test_a_name_that_is_no_codec_is_refused_with_those_that_are(name: str) -> None:
    with pytest.raises(BadRequest, match=r"unknown codec.*raw32.*topk:0.01.*zstd"):
        codec_named(name)


def test_a_codec_is_agreed_only_if_the_client_can_do_all_of_it() -> None:
    assert needs("topk:0.01+zstd") == {"topk", "zstd"}
    assert agree("topk:0.01+zstd", list(ABILITIES)) == "topk:0.01+zstd"
    assert agree("int8+zstd", ["fp16", "int8"]) == "fp16"
    assert (
        agree("topsign:0.1", ["raw32", "sign", "topk"]) == "raw32"
    )  # A client of a version without topsign.
    assert agree("int8", ["zstd", "raw32"]) == "raw32"
    with pytest.raises(WrongState, match=r"no codec in common.*smoke-signals"):
        agree("int8", ["zstd", "topk", "smoke-signals"])
