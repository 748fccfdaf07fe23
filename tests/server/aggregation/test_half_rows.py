"""Rows in float16: every finite float32 row is restored within the precision of float16."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from fairfleet.server.aggregation.half_rows import LARGEST, SMALLEST, TOP, ScaledRow, encode_row
from fairfleet.server.aggregation.history import History

MAXIMUM = float(np.finfo(np.float32).max)
rows = arrays(
    np.float32,
    st.integers(1, 20),
    elements=st.floats(width=32, allow_nan=False, allow_infinity=False)
    | st.floats(-4.0, 4.0, width=32),
)


def check_round_trip(row: np.ndarray) -> ScaledRow:
    scaled_row = encode_row(row, "float16")
    assert scaled_row.values.dtype == np.float16
    decoded = scaled_row.decoded()
    assert np.isfinite(decoded).all()
    wide, largest = row.astype(np.float64), float(np.abs(row).max())
    error = np.abs(decoded.astype(np.float64) - wide)
    # the last term is the rounding of subnormal float32 values
    assert (error <= 2.0**-11 * np.abs(wide) + 2.0**-17 * largest + 2.0**-149).all()
    assert (np.signbit(decoded) == np.signbit(row)).all()
    return scaled_row


@given(rows)
@example(np.array([1e6, 1.0, -1e-3], np.float32))
@example(np.array([65519.0, -1.0], np.float32))
@example(np.array([MAXIMUM, -MAXIMUM, 1e30], np.float32))
@example(np.array([1e-30, -3e-31], np.float32))
@example(np.array([1e-45, -0.0, 0.0], np.float32))
def test_a_row_of_any_magnitude_is_restored_within_the_precision_of_float16(
    row: np.ndarray,
) -> None:
    check_round_trip(row)


@given(rows, st.integers(-120, 100))
def test_the_relative_error_is_the_same_at_every_magnitude(row: np.ndarray, exponent: int) -> None:
    largest = float(np.abs(row).max())
    if 2.0**-4 <= largest <= 2.0**4:
        check_round_trip(np.ldexp(row, exponent))


@given(rows)
def test_a_row_within_the_range_of_float16_is_stored_unscaled(row: np.ndarray) -> None:
    scaled_row = encode_row(row, "float16")
    if SMALLEST <= np.abs(row).max() <= LARGEST:
        assert scaled_row.exponent == 0
        assert scaled_row.decoded() is scaled_row.values
        assert scaled_row.values.tobytes() == row.astype(np.float16).tobytes()
    elif row.any():
        assert 2.0 ** (TOP - 1) <= np.abs(scaled_row.values).max() <= 2.0**TOP


@pytest.mark.parametrize("value", [0.0, -0.0])
def test_a_row_of_zeros_has_no_scale_and_keeps_its_signs(value: float) -> None:
    scaled_row = check_round_trip(np.full(3, value, np.float32))
    assert scaled_row.exponent == 0


@pytest.mark.parametrize("largest", [1e300, 5e-324, 1e-60])
def test_float64_rows_beyond_float32_are_restored_too(largest: float) -> None:
    decoded = encode_row(np.array([largest, -largest / 2]), "float16").decoded()
    np.testing.assert_allclose(decoded, [largest, -largest / 2], rtol=2.0**-11)


@pytest.mark.parametrize("precision", ["float32", "float64"])
def test_other_precisions_have_no_scale(precision: str) -> None:
    scaled_row = encode_row(np.array([1e30, 1e-30], np.float32), precision)
    assert scaled_row.exponent == 0
    np.testing.assert_array_equal(
        scaled_row.values, np.array([1e30, 1e-30], np.float32).astype(precision)
    )


@pytest.mark.parametrize("value", [1e6, 3e38, 1e-30])
def test_inner_products_of_a_float16_history_are_those_of_its_decoded_rows(
    value: float,
) -> None:
    history = History([2, 3], precision="float16")
    values = {"large": value * np.arange(1, 6) / 5, "plain": np.arange(5) - 2.0}
    for client, row in values.items():
        assert history.put(client, 0, row.astype(np.float32))
    wide = np.array([history.row(client).astype(np.float64) for client in values])
    np.testing.assert_allclose(wide[0], values["large"], rtol=2.0**-11)
    products = history.products(list(values)).sum(axis=0)
    assert np.isfinite(products).all()
    np.testing.assert_allclose(products, wide @ wide.T, rtol=1e-12)
