"""Epsilon agrees with the formulas of the papers, and behaves monotonically."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairfleet.common.privacy_costs import report_cost, update_cost
from fairfleet.server.privacy import accountant
from fairfleet.server.privacy.accountant import PrivacySpent, SampledRelease, epsilon

DELTA = 1e-5


def delta_of_gaussian(multiplier: float, spent: float) -> float:
    """Return delta of one release by Balle and Wang 2018, theorem 8, for sensitivity 1."""

    def phi(x: float) -> float:
        return math.erfc(-x / math.sqrt(2)) / 2

    low, high = (
        1 / (2 * multiplier) - spent * multiplier,
        -1 / (2 * multiplier) - spent * multiplier,
    )
    return phi(low) - math.exp(spent) * phi(high)


@pytest.mark.parametrize("multiplier", [0.5, 1.0, 2.0, 4.0, 10.0])
@pytest.mark.parametrize("delta", [1e-3, 1e-5, 1e-7])
def test_one_gaussian_release_matches_the_exact_formula(multiplier: float, delta: float) -> None:
    spent = epsilon(PrivacySpent(1 / multiplier**2), delta)
    assert delta_of_gaussian(multiplier, spent) == pytest.approx(delta, rel=1e-6)


def test_published_values_are_reproduced() -> None:
    """Sensitivity 1, noise 1 and delta 1e-5 give 4.38 (Balle and Wang).

    With replacement of one client, the sensitivity is twice the norm.
    """
    assert epsilon(PrivacySpent(1.0), DELTA) == pytest.approx(4.377, abs=1e-3)
    assert epsilon(PrivacySpent(update_cost(2.0)), DELTA) == pytest.approx(4.377, abs=1e-3)
    assert report_cost(2.0, 3) == 0.75


def test_gaussian_releases_add_up_exactly() -> None:
    nine = PrivacySpent()
    for _ in range(9):
        nine = nine.plus(update_cost(6.0))
    assert epsilon(nine, DELTA) == pytest.approx(epsilon(PrivacySpent(update_cost(2.0)), DELTA))


def test_no_release_spends_nothing_and_no_noise_spends_everything() -> None:
    assert epsilon(PrivacySpent(), DELTA) == 0.0
    assert epsilon(PrivacySpent(update_cost(0.0)), DELTA) == math.inf
    assert epsilon(PrivacySpent(0.0, {SampledRelease(0.0, 1, 10): 1}), DELTA) == math.inf


@pytest.mark.parametrize("multiplier", [0.6, 1.0, 3.0])
@pytest.mark.parametrize(("drawn", "among"), [(1, 100), (10, 100), (50, 100)])
def test_a_drawn_round_has_the_divergence_of_wang_balle_and_kasiviswanathan(
    multiplier: float, drawn: int, among: int
) -> None:
    """The bound is checked at order 2, where it has a short form."""
    share, power = drawn / among, math.exp(1 / multiplier**2)
    expected = math.log1p(share**2 * min(4 * (power - 1), 2 * power))
    order = list(accountant._orders()).index(2.0)
    assert accountant._divergences(SampledRelease(multiplier, drawn, among))[
        order
    ] == pytest.approx(expected)


def test_selecting_all_clients_gives_no_amplification() -> None:
    assert epsilon(PrivacySpent(0.0, {SampledRelease(1.0, 10, 10): 3}), DELTA) == pytest.approx(
        epsilon(PrivacySpent(3.0), DELTA)
    )


@pytest.mark.slow
def test_a_random_draw_never_costs_more_than_a_known_selection() -> None:
    for multiplier in (0.1, 0.5, 2.0):
        for drawn in (1, 30, 99):
            secret, public = (
                PrivacySpent(0.5, {SampledRelease(multiplier, drawn, 100): 7}),
                PrivacySpent(0.5 + 7 / multiplier**2),
            )
            assert epsilon(secret, DELTA) <= epsilon(public, DELTA)


@given(st.floats(0.05, 50), st.floats(0.01, 50), st.sampled_from([1e-3, 1e-5, 1e-8]))
def test_more_releases_less_noise_and_a_smaller_delta_spend_more(
    direct: float, more: float, delta: float
) -> None:
    spent = epsilon(PrivacySpent(direct), delta)
    assert epsilon(PrivacySpent(direct).plus(more), delta) > spent
    assert epsilon(PrivacySpent(direct), delta / 10) > spent


def test_drawn_rounds_spend_more_with_more_rounds_more_clients_and_less_noise() -> None:
    by_rounds = [
        epsilon(PrivacySpent(0.0, {SampledRelease(2.0, 10, 100): times}), DELTA)
        for times in (1, 2, 10, 100)
    ]
    by_drawn = [
        epsilon(PrivacySpent(0.0, {SampledRelease(2.0, drawn, 100): 10}), DELTA)
        for drawn in (1, 5, 20, 100)
    ]
    by_noise = [
        epsilon(PrivacySpent(0.0, {SampledRelease(noise, 10, 100): 10}), DELTA)
        for noise in (8.0, 4.0, 2.0, 1.0)
    ]
    for row in (by_rounds, by_drawn, by_noise):
        assert row == sorted(set(row))


def test_noised_reports_and_drawn_rounds_are_composed() -> None:
    draws = {SampledRelease(2.0, 10, 100): 10}
    both = epsilon(PrivacySpent(1.0, draws), DELTA)
    assert both > max(epsilon(PrivacySpent(1.0), DELTA), epsilon(PrivacySpent(0.0, draws), DELTA))
    assert (
        both
        < epsilon(PrivacySpent(1.0), DELTA / 2) + epsilon(PrivacySpent(0.0, draws), DELTA / 2) + 0.5
    )


def test_epsilon_of_a_long_federation_is_finite() -> None:
    assert epsilon(PrivacySpent(1e4), DELTA) > 5000
    assert np.isfinite(epsilon(PrivacySpent(1e6), DELTA))
