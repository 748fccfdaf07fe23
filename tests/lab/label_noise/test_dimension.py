"""The intrinsic dimension is that of the set which the points fill."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fairfleet.lab.label_noise import dimension, intrinsic_dimension


@pytest.mark.parametrize("size", [1, 2, 4])
def test_points_that_fill_a_cube_have_its_dimension(size: int) -> None:
    random = np.random.default_rng(size)
    points = np.zeros((2000, 9))
    points[:, :size] = random.random((2000, size))
    rotation = np.linalg.qr(random.normal(size=(9, 9)))[0]
    assert intrinsic_dimension(points @ rotation) == pytest.approx(size, rel=0.15)


def test_the_dimension_of_three_points_is_that_of_the_formula() -> None:
    points = np.array([[0.0], [1.0], [3.0]])
    # Distances of the points to the two others: 1 and 3, 1 and 2, 2 and 3.
    expected = np.mean([-2 / math.log(1 / 3), -2 / math.log(1 / 2), -2 / math.log(2 / 3)])
    assert intrinsic_dimension(points) == pytest.approx(expected, rel=1e-4)


def test_it_does_not_depend_on_how_many_points_are_compared_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    points = np.random.default_rng(0).random((50, 3))
    expected = intrinsic_dimension(points)
    monkeypatch.setattr(dimension, "CHUNK", 7 * points.size)
    assert intrinsic_dimension(points) == pytest.approx(expected, rel=1e-12)


@given(st.integers(3, 40), st.integers(1, 5), st.integers(0, 2**32))
@settings(max_examples=40)
def test_equal_predictions_have_a_finite_dimension(distinct: int, copies: int, seed: int) -> None:
    points = np.repeat(np.random.default_rng(seed).random((distinct, 3)), copies, axis=0)
    for predictions in (points, np.zeros_like(points)):
        value = intrinsic_dimension(predictions)
        assert math.isfinite(value)
        assert value > 0


def test_two_samples_have_no_dimension() -> None:
    assert math.isnan(intrinsic_dimension(np.eye(2)))
