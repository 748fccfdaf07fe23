"""Epsilon: against the formulas of the papers, computed here another way, and against common sense."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairfleet.server import accounting
from fairfleet.server.accounting import Draw, Spent, epsilon, report_cost, update_cost

DELTA = 1e-5


def delta_of_gaussian(multiplier: float, spent: float) -> float:
    """Balle and Wang 2018, theorem 8, for sensitivity 1."""

    def phi(x: float) -> float:
        return math.erfc(-x / math.sqrt(2)) / 2

    low, high = 1 / (2 * multiplier) - spent * multiplier, -1 / (2 * multiplier) - spent * multiplier
    return phi(low) - math.exp(spent) * phi(high)


@pytest.mark.parametrize("multiplier", [0.5, 1.0, 2.0, 4.0, 10.0])
@pytest.mark.parametrize("delta", [1e-3, 1e-5, 1e-7])
def test_one_gaussian_release_spends_what_the_exact_formula_says(multiplier: float, delta: float) -> None:
    found = epsilon(Spent(1 / multiplier**2), delta)
    assert delta_of_gaussian(multiplier, found) == pytest.approx(delta, rel=1e-6)


def test_known_values() -> None:
    """Sensitivity 1, noise 1 and 1e-5 is 4.38 (Balle and Wang); replacement makes the sensitivity twice the norm."""
    assert epsilon(Spent(1.0), DELTA) == pytest.approx(4.377, abs=1e-3)
    assert epsilon(Spent(update_cost(2.0)), DELTA) == pytest.approx(4.377, abs=1e-3)
    assert report_cost(2.0, 3) == 0.75


def test_releases_add_up_as_gaussians_do() -> None:
    nine = Spent()
    for _ in range(9):
        nine = nine.plus(update_cost(6.0))
    assert epsilon(nine, DELTA) == pytest.approx(epsilon(Spent(update_cost(2.0)), DELTA))


def test_nothing_released_is_nothing_spent_and_no_noise_is_all() -> None:
    assert epsilon(Spent(), DELTA) == 0.0
    assert epsilon(Spent(update_cost(0.0)), DELTA) == math.inf
    assert epsilon(Spent(0.0, {Draw(0.0, 1, 10): 1}), DELTA) == math.inf


@pytest.mark.parametrize("multiplier", [0.6, 1.0, 3.0])
@pytest.mark.parametrize(("drawn", "among"), [(1, 100), (10, 100), (50, 100)])
def test_a_drawn_round_has_the_divergence_of_wang_balle_and_kasiviswanathan(
    multiplier: float, drawn: int, among: int
) -> None:
    """Their bound at order 2, where it is short enough to be written down."""
    share, power = drawn / among, math.exp(1 / multiplier**2)
    expected = math.log1p(share**2 * min(4 * (power - 1), 2 * power))
    order = list(accounting._orders()).index(2.0)
    assert accounting._divergences(Draw(multiplier, drawn, among))[order] == pytest.approx(expected)


def test_whoever_is_always_drawn_is_not_hidden() -> None:
    assert epsilon(Spent(0.0, {Draw(1.0, 10, 10): 3}), DELTA) == pytest.approx(epsilon(Spent(3.0), DELTA))


def test_a_lot_never_costs_more_than_to_be_known() -> None:
    for multiplier in (0.1, 0.5, 2.0):
        for drawn in (1, 30, 99):
            lot, known = Spent(0.5, {Draw(multiplier, drawn, 100): 7}), Spent(0.5 + 7 / multiplier**2)
            assert epsilon(lot, DELTA) <= epsilon(known, DELTA)


@given(st.floats(0.05, 50), st.floats(0.01, 50), st.sampled_from([1e-3, 1e-5, 1e-8]))
def test_more_releases_less_noise_and_a_smaller_delta_spend_more(direct: float, more: float, delta: float) -> None:
    spent = epsilon(Spent(direct), delta)
    assert epsilon(Spent(direct).plus(more), delta) > spent
    assert epsilon(Spent(direct), delta / 10) > spent


def test_drawn_rounds_spend_more_with_every_round_and_with_every_client_drawn() -> None:
    by_rounds = [epsilon(Spent(0.0, {Draw(2.0, 10, 100): times}), DELTA) for times in (1, 2, 10, 100)]
    by_drawn = [epsilon(Spent(0.0, {Draw(2.0, drawn, 100): 10}), DELTA) for drawn in (1, 5, 20, 100)]
    by_noise = [epsilon(Spent(0.0, {Draw(noise, 10, 100): 10}), DELTA) for noise in (8.0, 4.0, 2.0, 1.0)]
    for row in (by_rounds, by_drawn, by_noise):
        assert row == sorted(set(row))


def test_noised_reports_and_drawn_rounds_are_composed() -> None:
    draws = {Draw(2.0, 10, 100): 10}
    both = epsilon(Spent(1.0, draws), DELTA)
    assert both > max(epsilon(Spent(1.0), DELTA), epsilon(Spent(0.0, draws), DELTA))
    assert both < epsilon(Spent(1.0), DELTA / 2) + epsilon(Spent(0.0, draws), DELTA / 2) + 0.5


def test_a_long_federation_is_still_computed() -> None:
    assert epsilon(Spent(1e4), DELTA) > 5000
    assert np.isfinite(epsilon(Spent(1e6), DELTA))
