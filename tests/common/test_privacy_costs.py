"""Epsilon without a library is that of dp-accounting, and a limit's cost is its inverse."""

from __future__ import annotations

import math

import dp_accounting
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairfleet.common.privacy_costs import (
    ASYMPTOTIC,
    gaussian_delta,
    gaussian_epsilon,
    largest_cost,
    mills_ratio,
    report_cost,
    update_cost,
)

shifts = st.floats(-2.0, 3.0).map(lambda exponent: 10.0**exponent)
deltas = st.floats(-12.0, -1.0).map(lambda exponent: 10.0**exponent)


@given(shift=shifts, delta=deltas)
def test_epsilon_is_that_of_dp_accounting(shift: float, delta: float) -> None:
    expected = dp_accounting.get_epsilon_gaussian(1.0 / shift, delta)
    assert gaussian_epsilon(shift * shift, delta) == pytest.approx(expected, rel=1e-8, abs=1e-12)


@given(shift=shifts, delta=deltas)
def test_epsilon_is_never_too_small(shift: float, delta: float) -> None:
    assert gaussian_delta(gaussian_epsilon(shift * shift, delta), shift) <= delta


@given(epsilon=st.floats(0.01, 1e4), delta=deltas)
def test_the_largest_cost_of_a_limit_keeps_to_it_and_no_larger_one_does(
    epsilon: float, delta: float
) -> None:
    cost = largest_cost(epsilon, delta)
    assert gaussian_epsilon(cost, delta) <= epsilon
    assert gaussian_epsilon(cost * (1 + 1e-6), delta) > epsilon


def test_the_two_forms_of_mills_ratio_meet() -> None:
    below, above = math.nextafter(ASYMPTOTIC, 0.0), ASYMPTOTIC
    assert mills_ratio(below) == pytest.approx(mills_ratio(above), rel=1e-9)


def test_no_release_costs_nothing_and_one_without_noise_everything() -> None:
    assert gaussian_epsilon(0.0, 1e-5) == 0.0
    assert gaussian_epsilon(update_cost(0.0), 1e-5) == math.inf
    assert report_cost(2.0, 3) == 0.75
    assert update_cost(1e-200) == math.inf  # it does not overflow with an error
