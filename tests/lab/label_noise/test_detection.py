"""FedCorr's decisions: the split in two, the suspects, and what their labels are replaced by."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairfleet.lab.label_noise import (
    LabelNoise,
    intrinsic_dimension,
    most_suspect,
    noise_levels,
    noisy_clients,
    relabelled,
    suspects,
    with_label_noise,
    wrong_shares,
)
from fairfleet.lab.label_noise.mixture import upper_component

values = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=40).map(np.array)


@given(values)
def test_the_upper_component_has_the_larger_values(points: np.ndarray) -> None:
    upper = upper_component(points)
    if upper.any():
        assert not upper.all()
        assert points[upper].mean() > points[~upper].mean()
        assert points.argmin() not in np.flatnonzero(upper)
        assert upper[points.argmax()]


@given(values, st.integers(0, 2**32))
def test_the_split_does_not_depend_on_the_order(points: np.ndarray, seed: int) -> None:
    order = np.random.default_rng(seed).permutation(len(points))
    np.testing.assert_array_equal(upper_component(points)[order], upper_component(points[order]))


@pytest.mark.parametrize(("low", "high"), [(5, 200), (200, 5), (50, 50)])
def test_two_distant_groups_of_any_size_are_told_apart(low: int, high: int) -> None:
    random = np.random.default_rng(low)
    points = np.concatenate([random.normal(1.0, 0.1, low), random.normal(3.0, 0.3, high)])
    np.testing.assert_array_equal(upper_component(points), np.arange(low + high) >= low)


@pytest.mark.parametrize("side", [1.0, -1.0])
def test_a_wide_component_does_not_take_both_ends(side: float) -> None:
    random = np.random.default_rng(0)
    narrow, wide = random.normal(0.0, 0.01, 100), random.normal(2.0, 0.7, 30)
    points = side * np.concatenate([narrow, wide, [-0.5]])  # the last is beyond the narrow group
    assert upper_component(points)[-1] == (side < 0)


def test_equal_values_all_belong_to_the_lower_component() -> None:
    assert not upper_component(np.full(7, 0.3)).any()
    assert not upper_component(np.array([2.0])).any()
    assert not upper_component(np.zeros(0)).any()


@pytest.mark.parametrize("seed", range(5))
def test_clients_whose_predictions_spread_in_more_directions_are_found(seed: int) -> None:
    random = np.random.default_rng(seed)
    noisy = np.arange(12) < 5

    def predictions(directions: int) -> np.ndarray:
        logits = random.normal(size=(200, directions)) @ random.normal(size=(directions, 10))
        exponentials = np.exp(logits)
        return np.asarray(exponentials / exponentials.sum(1, keepdims=True))

    dimensions = [intrinsic_dimension(predictions(5 if each else 2)) for each in noisy]
    np.testing.assert_array_equal(noisy_clients(np.array(dimensions)), noisy)


def test_a_client_without_a_dimension_counts_as_clean() -> None:
    noisy = noisy_clients(np.array([1.0, np.nan, 1.1, 4.0, 4.1]))
    assert noisy.tolist() == [False, False, False, True, True]
    assert not noisy_clients(np.full(3, np.nan)).any()


@given(st.integers(0, 2**32), st.floats(0.1, 0.8))
def test_the_estimated_level_is_the_share_of_wrong_labels(seed: int, level: float) -> None:
    """A good model has a small loss on right labels and a large one on wrong ones."""
    random = np.random.default_rng(seed)
    wrong = random.random(500) < level
    losses = np.where(wrong, random.normal(4.0, 0.5, 500), random.normal(0.3, 0.1, 500))
    assert suspects(losses).mean() == pytest.approx(wrong.mean(), abs=0.02)


def test_the_reviewed_samples_are_those_with_the_highest_losses() -> None:
    losses = np.array([0.1, 5.0, 0.2, 4.0, 3.0, 6.0])
    assert most_suspect(losses, level=4 / 6, share=0.5).tolist() == [5, 1]
    assert most_suspect(losses, level=0.0, share=1.0).tolist() == []


def test_only_reviewed_labels_are_replaced_and_only_by_a_certain_model() -> None:
    labels = np.array([0, 0, 0, 0])
    probabilities = np.array([[0.1, 0.9], [0.5, 0.5], [0.2, 0.8], [0.9, 0.1]])
    assert relabelled(labels, probabilities, 0.5).tolist() == [1, 0, 1, 0]
    assert relabelled(labels, probabilities, 0.5, np.array([0, 1])).tolist() == [1, 0, 0, 0]
    assert relabelled(labels, probabilities, 0.85).tolist() == [1, 0, 0, 0]
    assert labels.tolist() == [0, 0, 0, 0]


@given(st.integers(0, 2**32))
def test_a_correction_by_a_good_model_lowers_the_share_of_wrong_labels(seed: int) -> None:
    """The model gives 90 % of the samples their right class, with a probability of 0.8."""
    random, classes = np.random.default_rng(seed), 5
    truth = [random.integers(0, classes, 300) for _ in range(4)]
    noise = LabelNoise(clients=1.0, lowest=0.5)
    noisy = with_label_noise(truth, classes, noise, seed)
    assert (noise_levels(noise, 4, seed) >= 0.5).all()
    corrected = []
    for labels, right in zip(noisy, truth, strict=True):
        predicted = np.where(random.random(300) < 0.9, right, (right + 1) % classes)
        probabilities = np.where(np.eye(classes)[predicted] > 0, 0.8, 0.05)
        losses = -np.log(probabilities[np.arange(300), labels])
        reviewed = most_suspect(losses, float(suspects(losses).mean()), 0.5)
        corrected.append(relabelled(labels, probabilities, 0.5, reviewed))
    before, after = wrong_shares(noisy, truth), wrong_shares(corrected, truth)
    assert all(a < b for a, b in zip(after, before, strict=True))
