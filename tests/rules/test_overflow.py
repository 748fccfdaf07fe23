"""A combination is finite wherever its true value fits float32, whatever its terms are."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fairfleet.server.aggregation.aggregator import aggregate
from fairfleet.server.gram.blocks import chunks
from fairfleet.server.gram.engine import GramEngine
from fairfleet.server.gram.kernel import Kernel
from fairfleet.server.gram.numpy_kernel import NumpyKernel
from fairfleet.server.rules import Report, recipe
from fairfleet.server.rules.robust import column_median
from tests.support.samples.torch_kernels import torch_kernel

LAYERS = [7, 1000, 2]
SIZE = sum(LAYERS)
LARGEST = float(np.finfo(np.float32).max)
HUGE = 3.4e38


def engine_of(rows: list[np.ndarray] | np.ndarray, kernel: Kernel | None = None) -> GramEngine:
    """Return an engine with these rows, numbered from 0."""
    engine = GramEngine(LAYERS, kernel)
    engine.extend(dict(enumerate(rows)))
    return engine


def apart(rows: np.ndarray) -> list[np.ndarray]:
    """Return copies of the rows in separate memory: they are not combined as one matrix."""
    return [row.copy() for row in rows]


values = st.one_of(
    st.floats(-LARGEST, LARGEST, width=32),
    st.sampled_from([0.0, HUGE, -HUGE, LARGEST, 1e20, -1e20, 1e-45, -1e-45, 1e-38]),
)
weights = st.one_of(
    st.floats(-10, 10),
    st.floats(-1e40, 1e40),
    st.sampled_from([0.5, 1.0, -1.0, 1.5, 2.0, 1e-45, 1e-39, 1e45, 1e-300]),
)


@st.composite
def combinations(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    """Draw rows of a few values each, and one coefficient per row or per layer and row."""
    count = draw(st.integers(1, 5))
    rows = np.zeros((count, SIZE), np.float32)
    for row in rows:
        row[:] = np.resize(
            np.array(draw(st.lists(values, min_size=1, max_size=4)), np.float32), SIZE
        )
    shape = (count,) if draw(st.booleans()) else (len(LAYERS), count)
    many = int(np.prod(shape))
    return rows, np.array(draw(st.lists(weights, min_size=many, max_size=many))).reshape(shape)


@given(combinations(), st.booleans())
@settings(max_examples=300)
def test_values_that_fit_float32_are_finite_and_correct(
    case: tuple[np.ndarray, np.ndarray], in_one_matrix: bool
) -> None:
    rows, coefficients = case
    combined = engine_of(rows if in_one_matrix else apart(rows)).combine(
        range(len(rows)), coefficients
    )
    per_layer = np.broadcast_to(coefficients, (len(LAYERS), len(rows)))
    lines = np.repeat(per_layer, LAYERS, axis=0)  # (columns, rows)
    terms = lines.T * rows.astype(np.float64)
    expected, reach = terms.sum(axis=0), np.abs(terms).sum(axis=0)
    fits = np.abs(expected) + 1e-6 * reach < LARGEST  # beyond rounding
    assert np.isfinite(combined[fits]).all()
    # The error of each value is small relative to the largest terms of its layer, as in a
    # float32 sum.
    scale = np.repeat(
        [part.max(initial=0.0) for part in np.split(reach, np.cumsum(LAYERS)[:-1])], LAYERS
    )
    scale = np.maximum(scale, reach.max()) if coefficients.ndim == 1 else scale
    assert (np.abs(combined - expected)[fits] <= 1e-5 * scale[fits] + 1e-44).all()


@pytest.mark.parametrize("name", ["numpy", "torch"])
@pytest.mark.parametrize(
    ("column", "coefficients", "expected"),
    [
        ([HUGE, HUGE], [0.5, 0.5], HUGE),
        ([HUGE, HUGE], [2.0, -1.5], 0.5 * HUGE),  # a term overflows
        ([HUGE, HUGE, -HUGE], [1.0, 1.0, 1.0], HUGE),  # a partial sum does
        ([2.0**-140, 0.0], [2.0**140, 1.0], 1.0),  # a coefficient does
        ([HUGE, 0.0], [1e-45, 1.0], HUGE * 1e-45),  # a coefficient has few digits in float32
        ([HUGE, 0.0], [1e-60, 1.0], HUGE * 1e-60),  # or none
    ],
)
def test_no_term_or_partial_sum_overflows_or_vanishes(
    column: list[float], coefficients: list[float], expected: float, name: str
) -> None:
    kernel = torch_kernel() if name == "torch" else None
    rows = np.repeat(np.array(column, np.float32)[:, None], SIZE, axis=1)
    for layout in (rows, apart(rows)):
        combined = engine_of(layout, kernel).combine(range(len(rows)), np.array(coefficients))
        np.testing.assert_allclose(combined, np.float32(expected), rtol=1e-6)


def test_a_result_that_does_not_fit_is_reported_as_not_finite() -> None:
    rows = np.full((2, SIZE), HUGE, np.float32)
    combined, is_finite = engine_of(rows).combine_checked(range(2), np.ones(2))
    assert not is_finite
    assert np.isinf(combined).all()
    assert engine_of(rows).combine_checked(range(2), np.full(2, 0.5))[1]


@given(st.integers(0, 2**32 - 1), st.integers(1, 6), st.booleans(), st.floats(-15, 15))
@settings(max_examples=60)
def test_ordinary_rows_are_combined_in_float32_to_the_last_bit(
    seed: int, count: int, in_one_matrix: bool, exponent: float
) -> None:
    """The reference is the kernel's plain float32 sum."""
    draw = np.random.default_rng(seed)
    rows = (draw.standard_normal((count, SIZE)) * 10.0**exponent).astype(np.float32)
    coefficients = draw.uniform(0.01, 1.0, count)
    layout = rows if in_one_matrix else apart(rows)
    combined = engine_of(layout).combine(range(count), coefficients)
    expected, narrow = np.empty(SIZE, np.float32), np.zeros(1, bool)
    NumpyKernel().combine(list(layout), coefficients[None], narrow, list(chunks([SIZE])), expected)
    assert combined.tobytes() == expected.tobytes()


def test_squares_of_the_largest_rows_are_summed_in_float64() -> None:
    rows = np.full((3, SIZE), HUGE, np.float32)
    engine = engine_of(rows)
    np.testing.assert_allclose(engine.norms(range(3)), np.float64(np.float32(HUGE)) * SIZE**0.5)
    assert np.isfinite(engine.gram(range(3)).layers).all()


@pytest.mark.parametrize(
    "rule", ["fedavg", "fedavg_n", "median", "trimmed_mean", "krum", "fedmgda", "fedlf", "adafed"]
)
def test_rules_take_a_mean_of_the_largest_updates(rule: str) -> None:
    rows = {name: np.full(SIZE, HUGE, np.float32) for name in ("ann", "bob", "cem", "dia")}
    reports = {name: Report(samples=10, loss=1.0 + k) for k, name in enumerate(rows)}
    out = aggregate(np.zeros(SIZE, np.float32), rows, reports, recipe(rule), layers=LAYERS)
    assert np.isfinite(out.model).all()
    cosines = (
        out.diagnostics.conflict_map.cosines() if out.diagnostics.conflict_map else np.zeros(0)
    )
    np.testing.assert_allclose(cosines, 1.0, atol=1e-6)


def test_the_median_of_huge_values_is_finite_and_ordinary_medians_are_exact() -> None:
    huge = np.full((4, 5), HUGE, np.float32)
    np.testing.assert_array_equal(column_median(huge), huge[0])
    draw = np.random.default_rng(0)
    for columns in (
        draw.standard_normal((4, 9)).astype(np.float32),
        np.full((4, 3), 1e-45, np.float32),
    ):
        ordered = np.sort(columns, axis=0)
        np.testing.assert_array_equal(column_median(columns), (ordered[1] + ordered[2]) / 2)
