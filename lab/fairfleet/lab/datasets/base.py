"""The form that every dataset takes: arrays of samples and labels, the training part first.

Values keep the type in which they are stored (bytes stay bytes). The `preprocessing` module
converts them for a model, so that only the share of a client in use is converted, not the
complete dataset at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fairfleet.common.errors import UsageError

Array = NDArray[Any]
Labels = NDArray[np.int64]


class MissingDataset(UsageError):
    """The files of a dataset are in none of the folders where they may be."""


class BrokenDataset(UsageError):
    """The files of a dataset exist, but their content is not what it should be."""


@dataclass(frozen=True)
class Dataset:
    """Samples with labels, of which the first `train_size` are the published training part.

    Raises BrokenDataset if the arrays do not fit together or a label is out of range.
    """

    name: str
    x: Array  # The first axis counts the samples.
    y: Labels
    train_size: int  # The samples from this index on are the published test part.
    classes: int
    user: Labels | None = None  # Index of each sample's natural client, if the data has any.
    user_names: tuple[str, ...] = ()
    class_names: tuple[str, ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        samples = len(self.y)
        if len(self.x) != samples:
            raise BrokenDataset(
                f"{self.name} has {len(self.x)} samples and {samples} labels: "
                "expected one label for each sample"
            )
        if self.user is not None and len(self.user) != samples:
            raise BrokenDataset(
                f"{self.name} names the user of {len(self.user)} samples, but has {samples} samples"
            )
        if not 0 <= self.train_size <= samples:
            raise BrokenDataset(
                f"{self.name} has a training part of {self.train_size} samples, "
                f"expected 0 to {samples}, the number of its samples"
            )
        self._check_labels()

    def _check_labels(self) -> None:
        if not len(self.y):
            raise BrokenDataset(f"{self.name} has no samples")
        if self.y.min() < 0 or self.y.max() >= self.classes:
            raise BrokenDataset(
                f"{self.name} has labels from {self.y.min()} to {self.y.max()}, "
                f"expected 0 to {self.classes - 1}"
            )

    def __len__(self) -> int:
        return len(self.y)

    def training_part(self) -> Dataset:
        """Return the dataset without its published test part."""
        train = slice(self.train_size)
        return replace(
            self,
            x=self.x[train],
            y=self.y[train],
            user=None if self.user is None else self.user[train],
        )

    def only_classes(self, labels: Sequence[int]) -> Dataset:
        """Return the samples of these classes; the first class becomes 0, the second 1, and so on.

        Raises UsageError if a label is unknown or given twice.
        """
        self._check_selection(labels)
        new_labels = np.full(self.classes, -1, np.int64)
        new_labels[list(labels)] = np.arange(len(labels))
        selected = np.flatnonzero(new_labels[self.y] >= 0)
        names = tuple(self.class_names[label] for label in labels) if self.class_names else ()
        return replace(
            self,
            x=self.x[selected],
            y=new_labels[self.y[selected]],
            train_size=int(np.searchsorted(selected, self.train_size)),
            classes=len(labels),
            user=None if self.user is None else self.user[selected],
            class_names=names,
        )

    def _check_selection(self, labels: Sequence[int]) -> None:
        if unknown := [label for label in labels if not 0 <= label < self.classes]:
            raise UsageError(
                f"{self.name} has classes 0 to {self.classes - 1}; {unknown} are not among them"
            )
        if len(set(labels)) < len(labels):
            raise UsageError(
                f"the selected classes {list(labels)} of {self.name} contain a duplicate: "
                "name each class only once"
            )


class Parts(NamedTuple):
    """Samples and labels, those of the published training part first."""

    x: Array
    y: Labels
    train_size: int


def concatenate_parts(
    train: Sequence[tuple[Array, Array]], test: Sequence[tuple[Array, Array]]
) -> Parts:
    """Join pairs of samples and labels, one pair for each file, into one array of each.

    Raises BrokenDataset if the pairs do not fit together.
    """
    for x, y in (*train, *test):
        if len(x) != len(y):
            raise BrokenDataset(
                f"one file has {len(x)} samples and {len(y)} labels: "
                "expected one label for each sample"
            )
    try:
        x = np.concatenate([x for x, _ in (*train, *test)])
    except ValueError as error:
        raise BrokenDataset(f"the parts of the dataset do not fit together: {error}") from error
    y = np.concatenate([y for _, y in (*train, *test)]).astype(np.int64)
    return Parts(x, y, sum(len(y) for _, y in train))
