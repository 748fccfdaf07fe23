"""What every dataset becomes: arrays of samples and labels, the published training part first.

Values are kept as they are stored (bytes stay bytes); `preprocessing` makes them fit for a model, so that a client's
share is converted when it is needed and not the whole set at once.
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
    """The files are in none of the places where they may be."""


class BrokenDataset(UsageError):
    """Files that are there, but do not hold what they should."""


@dataclass(frozen=True)
class Dataset:
    name: str
    x: Array  # first axis: samples
    y: Labels
    train_size: int  # the first so many samples are the published training part; the others its test part
    classes: int
    user: Labels | None = None  # whose each sample is, where the data has natural clients
    user_names: tuple[str, ...] = ()
    class_names: tuple[str, ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        if len(self.x) != len(self.y):
            raise BrokenDataset(f"{self.name} has {len(self.x)} samples and {len(self.y)} labels: they must be as many")
        if self.user is not None and len(self.user) != len(self.y):
            raise BrokenDataset(f"{self.name} says of {len(self.user)} samples whose they are, but has {len(self.y)}")
        if not 0 <= self.train_size <= len(self.y):
            raise BrokenDataset(
                f"{self.name} has {len(self.y)} samples, of which {self.train_size} cannot be for training"
            )
        if not len(self.y):
            raise BrokenDataset(f"{self.name} has no samples at all")
        if self.y.min() < 0 or self.y.max() >= self.classes:
            raise BrokenDataset(
                f"{self.name} has labels from {self.y.min()} to {self.y.max()}, expected 0 to {self.classes - 1}"
            )

    def __len__(self) -> int:
        return len(self.y)

    @property
    def sample_shape(self) -> tuple[int, ...]:
        return self.x.shape[1:]

    def training_part(self) -> Dataset:
        """Without the published test part."""
        upto = slice(self.train_size)
        return replace(self, x=self.x[upto], y=self.y[upto], user=None if self.user is None else self.user[upto])

    def only_classes(self, kept: Sequence[int]) -> Dataset:
        """The samples of these classes; the first becomes class 0, the second class 1 and so on."""
        if unknown := [label for label in kept if not 0 <= label < self.classes]:
            raise UsageError(f"{self.name} has classes 0 to {self.classes - 1}; {unknown} are not among them")
        if len(set(kept)) < len(kept):
            raise UsageError(f"of {self.name} the classes {list(kept)} were asked for: name each only once")
        renamed = np.full(self.classes, -1, np.int64)
        renamed[list(kept)] = np.arange(len(kept))
        chosen = np.flatnonzero(renamed[self.y] >= 0)
        return replace(
            self,
            x=self.x[chosen],
            y=renamed[self.y[chosen]],
            train_size=int(np.searchsorted(chosen, self.train_size)),
            classes=len(kept),
            user=None if self.user is None else self.user[chosen],
            class_names=tuple(self.class_names[label] for label in kept) if self.class_names else (),
        )


class Parts(NamedTuple):
    """Samples and labels, those of the published training part first."""

    x: Array
    y: Labels
    train_size: int


def pooled(train: Sequence[tuple[Array, Array]], test: Sequence[tuple[Array, Array]]) -> Parts:
    """From pairs of samples and labels, as they come in files."""
    for x, y in (*train, *test):
        if len(x) != len(y):
            raise BrokenDataset(f"found {len(x)} samples with {len(y)} labels in one file: they must be as many")
    try:
        x = np.concatenate([x for x, _ in (*train, *test)])
    except ValueError as error:
        raise BrokenDataset(f"the parts of the dataset do not fit together: {error}") from error
    y = np.concatenate([y for _, y in (*train, *test)]).astype(np.int64)
    return Parts(x, y, sum(len(y) for _, y in train))
