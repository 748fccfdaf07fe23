"""Label noise follows from the seed, reaches noisy clients only, and has the configured level."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from fairfleet.lab.label_noise import LabelNoise, noise_levels, with_label_noise, wrong_shares

CLASSES = 10
shares = st.floats(0, 1)
noises = st.builds(LabelNoise, clients=shares, lowest=shares)
fleets = st.lists(st.integers(0, 30), min_size=1, max_size=12)
seeds = st.integers(0, 2**32)


def labels_of(sizes: list[int]) -> list[np.ndarray]:
    return [np.arange(size, dtype=np.int64) % CLASSES for size in sizes]


@given(noises, fleets, seeds)
def test_clean_clients_keep_their_labels_and_noisy_ones_have_valid_labels(
    noise: LabelNoise, sizes: list[int], seed: int
) -> None:
    labels = labels_of(sizes)
    levels = noise_levels(noise, len(sizes), seed)
    for level, before, after in zip(
        levels, labels, with_label_noise(labels, CLASSES, noise, seed), strict=True
    ):
        assert level == 0 or noise.lowest <= level <= 1
        assert after.dtype == np.int64
        assert after.shape == before.shape
        assert np.isin(after, range(CLASSES)).all()
        if level == 0:
            np.testing.assert_array_equal(after, before)


@given(noises, fleets, seeds)
def test_the_noise_follows_from_the_seed_and_leaves_the_given_labels_alone(
    noise: LabelNoise, sizes: list[int], seed: int
) -> None:
    labels = labels_of(sizes)
    first, again = (with_label_noise(labels, CLASSES, noise, seed) for _ in range(2))
    for a, b, untouched, original in zip(first, again, labels, labels_of(sizes), strict=True):
        np.testing.assert_array_equal(a, b)
        np.testing.assert_array_equal(untouched, original)


def test_the_share_of_wrong_labels_is_the_level_times_that_of_the_other_classes() -> None:
    noise, labels = LabelNoise(clients=0.5, lowest=0.4), labels_of([20_000] * 20)
    levels = noise_levels(noise, 20, seed=3)
    assert 3 <= np.count_nonzero(levels) <= 17
    wrong = wrong_shares(with_label_noise(labels, CLASSES, noise, seed=3), labels)
    np.testing.assert_allclose(wrong, 0.9 * levels, atol=0.015)


def test_another_seed_draws_other_clients_and_labels() -> None:
    noise, labels = LabelNoise(), labels_of([100] * 10)
    first, second = (with_label_noise(labels, CLASSES, noise, seed) for seed in (0, 1))
    assert any((a != b).any() for a, b in zip(first, second, strict=True))
    assert (noise_levels(noise, 10, 0) != noise_levels(noise, 10, 1)).any()
