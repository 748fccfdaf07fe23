"""Fairness measures have their published definitions, ranges and invariances."""

from __future__ import annotations

import math
from dataclasses import asdict
from random import Random

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from numpy.typing import NDArray

from fairfleet.common import fairness
from fairfleet.common.fairness import Fairness

# Zero, or a number that a measurement could give: squares of smaller numbers become 0.
accuracies = st.lists(st.just(0.0) | st.floats(1e-6, 1e6), min_size=1, max_size=40).map(np.array)


def test_measures_of_four_clients_match_hand_computed_values() -> None:
    measures = Fairness.of([1.0, 2.0, 3.0, 6.0])
    assert measures.clients == 4
    assert measures.mean == 3.0
    assert measures.variance == pytest.approx((4 + 1 + 0 + 9) / 4)
    assert measures.standard_deviation == pytest.approx(math.sqrt(3.5))
    assert (measures.worst_5, measures.worst_10, measures.worst_30) == (1.0, 1.0, 1.0)
    assert (measures.best_5, measures.best_10) == (6.0, 6.0)
    assert (measures.min, measures.max) == (1.0, 6.0)
    assert measures.angle_radians == pytest.approx(math.acos(12 / (math.sqrt(4) * math.sqrt(50))))
    assert measures.angle_degrees == pytest.approx(31.948, abs=1e-3)
    assert measures.jain == pytest.approx(144 / (4 * 50))
    assert measures.relative_deviation == pytest.approx(math.sqrt(3.5) / 3)
    # the pairs differ by 1, 2, 5, 1, 4, 3: 16 in all, each counted twice
    assert measures.gini == pytest.approx(2 * 16 / (2 * 4**2 * 3))
    shares = [1 / 12, 2 / 12, 3 / 12, 6 / 12]
    assert measures.kl_to_uniform == pytest.approx(sum(p * math.log(p * 4) for p in shares))


def test_a_published_row_is_reproduced() -> None:
    """FedFV Table 3, FedAvg: 64.26, 87.03 and 89.97 % give the mean 80.42 and the "Var." 11.50."""
    measures = Fairness.of([64.26, 87.03, 89.97])
    assert measures.mean == pytest.approx(80.42, abs=0.01)
    assert measures.standard_deviation == pytest.approx(11.50, abs=0.05)


@pytest.mark.parametrize(
    ("percent", "clients", "count"),
    [
        (5, 100, 5),
        (5, 10, 1),
        (5, 39, 1),
        (5, 59, 2),
        (10, 10, 1),
        (30, 10, 3),
        (30, 100, 30),
        (29, 100, 29),
    ],
)
def test_a_share_of_clients_is_rounded_down_to_at_least_one(
    percent: int, clients: int, count: int
) -> None:
    assert fairness.share_of(percent, clients) == count
    assert fairness.worst(np.arange(clients), percent) == (count - 1) / 2
    assert fairness.best(np.arange(clients), percent) == clients - 1 - (count - 1) / 2


def test_the_worst_clients_are_those_with_the_highest_losses() -> None:
    losses = [0.1, 0.2, 0.3, 2.0, 1.0, 0.5, 0.4, 0.6, 0.7, 0.8]
    measures = Fairness.of(losses, higher_is_better=False)
    assert measures.worst_10 == 2.0
    assert measures.worst_30 == pytest.approx((2.0 + 1.0 + 0.8) / 3)
    assert measures.best_10 == 0.1


def test_improved_share_counts_only_clients_that_are_served_better() -> None:
    before, after = [0.5, 0.5, 0.5, 0.5], [0.6, 0.5, 0.4, 0.9]
    assert fairness.improved_share(before, after) == 0.5
    assert fairness.improved_share(before, after, higher_is_better=False) == 0.25
    assert fairness.improved_share([0.5], [0.6]) == 1.0
    assert math.isnan(fairness.improved_share([], []))
    with pytest.raises(ValueError, match="same clients"):
        fairness.improved_share([0.5], [0.5, 0.6])


def test_unless_strict_a_client_that_is_served_as_before_counts_as_improved() -> None:
    before, after = [0.5, 0.5, 0.5, 0.5], [0.6, 0.5, 0.4, 0.9]
    assert fairness.improved_share(before, after, strictly=False) == 0.75
    assert fairness.improved_share(before, after, strictly=False, higher_is_better=False) == 0.5
    assert math.isnan(fairness.improved_share([], [], strictly=False))


def test_in_percent_deviations_are_100_times_and_variances_10000_times_as_large() -> None:
    fractions = [0.6426, 0.8703, 0.8997]
    fractional, percent = Fairness.of(fractions), Fairness.of([100 * value for value in fractions])
    for name in ("mean", "standard_deviation", "worst_10", "best_10", "min", "max"):
        assert getattr(percent, name) == pytest.approx(100 * getattr(fractional, name))
    assert percent.variance == pytest.approx(10_000 * fractional.variance)
    assert percent.angle_degrees == pytest.approx(fractional.angle_degrees)


def test_every_measure_is_nan_without_clients() -> None:
    measures = asdict(Fairness.of([]))
    assert measures.pop("clients") == 0
    assert all(math.isnan(value) for value in measures.values())


@pytest.mark.parametrize("values", [[0.0], [0.83], [0.0] * 7, [0.1] * 3, [1e-9] * 10, [84.7] * 11])
def test_equal_values_are_perfectly_even(values: list[float]) -> None:
    measures = Fairness.of(values)
    assert (
        measures.mean
        == measures.min
        == measures.max
        == measures.worst_5
        == measures.best_5
        == values[0]
    )
    assert measures.standard_deviation == measures.variance == measures.relative_deviation == 0.0
    assert (
        measures.angle_degrees
        == measures.angle_radians
        == measures.kl_to_uniform
        == measures.gini
        == 0.0
    )
    assert measures.jain == 1.0


def test_one_client_with_everything_gives_the_extreme_of_every_measure() -> None:
    measures = Fairness.of([0.0, 0.0, 0.0, 5.0])
    assert measures.jain == pytest.approx(1 / 4)
    assert measures.gini == pytest.approx(3 / 4)
    assert measures.kl_to_uniform == pytest.approx(math.log(4))
    assert measures.angle_degrees == pytest.approx(60.0)
    assert measures.relative_deviation == pytest.approx(math.sqrt(3))


def test_only_measures_of_shares_are_nan_for_negative_values() -> None:
    measures = Fairness.of([-1.0, 1.0])
    assert math.isnan(measures.gini)
    assert math.isnan(measures.kl_to_uniform)
    assert measures.relative_deviation == math.inf
    assert measures.angle_degrees == pytest.approx(90.0)
    assert measures.jain == pytest.approx(0.0)


@pytest.mark.parametrize(
    ("values", "reason"),
    [([0.5, math.nan], "NaN"), ([math.inf], "infinity"), ([[0.5]], r"\(1, 1\)"), (0.5, r"\(\)")],
)
def test_values_that_are_not_a_finite_vector_are_refused(values: object, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        Fairness.of(values)  # type: ignore[arg-type]


@given(accuracies)
def test_every_measure_is_within_its_range(values: NDArray[np.float64]) -> None:
    measures, count = Fairness.of(values), len(values)
    slack = 1 + 1e-9
    assert measures.min <= measures.worst_5 * slack
    assert measures.worst_5 <= measures.worst_10 * slack
    assert measures.worst_10 <= measures.worst_30 * slack
    assert measures.worst_30 <= measures.mean * slack
    assert measures.mean <= measures.best_10 * slack
    assert measures.best_10 <= measures.best_5 * slack
    assert measures.best_5 <= measures.max * slack
    assert 0 <= measures.gini <= (count - 1) / count + 1e-9
    assert 1 / count - 1e-9 <= measures.jain <= 1
    assert 0 <= measures.kl_to_uniform <= math.log(count) + 1e-9
    assert 0 <= measures.angle_degrees < 90


@given(accuracies, st.floats(0.01, 100), st.randoms())
def test_unitless_measures_depend_on_neither_unit_nor_order(
    values: NDArray[np.float64], factor: float, random: Random
) -> None:
    mixed = factor * np.array(sorted(values, key=lambda _: random.random()))
    original, scaled = Fairness.of(values), Fairness.of(mixed)
    for name in ("angle_radians", "kl_to_uniform", "gini", "jain", "relative_deviation"):
        assert getattr(original, name) == pytest.approx(getattr(scaled, name), rel=1e-6, abs=1e-6)
    for name in ("mean", "standard_deviation", "worst_30", "best_5", "min", "max"):
        assert factor * getattr(original, name) == pytest.approx(
            getattr(scaled, name), rel=1e-6, abs=1e-6 * largest(mixed)
        )


@given(accuracies)
def test_measures_equal_their_textbook_forms(values: NDArray[np.float64]) -> None:
    measures, count, total = Fairness.of(values), len(values), values.sum()
    assert measures.standard_deviation == pytest.approx(
        np.std(values), rel=1e-6, abs=1e-9 * largest(values)
    )
    if total:
        differences = np.abs(values[:, None] - values[None, :]).sum()
        assert measures.gini == pytest.approx(differences / (2 * count * total), rel=1e-6, abs=1e-9)
        assert measures.jain == pytest.approx(total**2 / (count * (values**2).sum()), rel=1e-9)


@given(accuracies)
def test_a_transfer_from_best_to_worst_client_increases_fairness(
    values: NDArray[np.float64],
) -> None:
    assume(values.max() > values.min())
    gift = 0.25 * (values.max() - values.min())
    changed = values.copy()
    changed[values.argmax()] -= gift
    changed[values.argmin()] += gift
    before, after = Fairness.of(values), Fairness.of(changed)
    assert after.gini < before.gini + 1e-12
    assert after.standard_deviation < before.standard_deviation * (1 + 1e-12)
    assert after.jain > before.jain - 1e-12
    assert after.kl_to_uniform < before.kl_to_uniform + 1e-12


def largest(values: NDArray[np.float64]) -> float:
    return float(np.abs(values).max())
