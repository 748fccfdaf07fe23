"""The split of each client's samples into train, test and validation.

All functions are pure and seeded; the samples of a client are an array of indices.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from fairfleet.common.errors import UsageError
from fairfleet.lab.partitioning.partitions import Indices


class Split(NamedTuple):
    """The samples of one client by their use."""

    train: Indices
    test: Indices
    validation: Indices


def check_shares(shares: Sequence[float]) -> None:
    """Raise UsageError unless there are two or three shares from 0 that add up to 1."""
    # A comparison with NaN is false, so this form refuses NaN as well.
    if len(shares) not in (2, 3) or not (min(shares) >= 0 and abs(sum(shares) - 1) <= 1e-6):
        raise UsageError(
            f"the shares of train, test and validation: found {tuple(shares)}; give two or three, "
            "none below 0, that add up to 1, such as 0.8, 0.2"
        )


def split(
    indices: Indices, shares: Sequence[float] = (0.8, 0.2), seed: int | Sequence[int] = 0
) -> Split:
    """Shuffle, then cut into train, test and (if there is a third share) validation.

    A client with two samples or more has at least one to train and, if the test's share is above
    0, one to test. Raises UsageError if the shares do not add up to 1.
    """
    check_shares(shares)
    _, test, validation = (*shares, 0.0)[:3]
    total = len(indices)
    test_size = min(max(round(test * total), int(test > 0)), max(total - 1, 0))
    validation_size = min(round(validation * total), max(total - test_size - 1, 0))
    shuffled = np.random.default_rng(seed).permutation(indices)
    cuts = [total - test_size - validation_size, total - validation_size]
    return Split(*np.split(shuffled, cuts))


def split_all(
    parts: Sequence[Indices], shares: Sequence[float] = (0.8, 0.2), seed: int = 0
) -> list[Split]:
    """Split the samples of each client with its own random draw.

    So the share of one client never changes the split of another.
    """
    return [split(indices, shares, (seed, client)) for client, indices in enumerate(parts)]


def split_as_published(parts: Sequence[Indices], train_size: int) -> list[Split]:
    """Split each client's samples by the dataset's published training and test parts.

    Raises UsageError if a client has no sample in the training part.
    """
    no_validation = np.empty(0, np.int64)
    splits = [
        Split(indices[indices < train_size], indices[indices >= train_size], no_validation)
        for indices in parts
    ]
    if idle := sum(not len(client.train) for client in splits):
        raise UsageError(
            f"{idle} of {len(splits)} clients have no sample in the published training part; split "
            "each client's samples by shares instead, such as 0.8, 0.2"
        )
    return splits
