"""From values as stored to float32 for a model: the conversions that the papers use, by name.

What is measured (a mean, a deviation) is measured once over a whole set; the conversion itself is applied to any part
of it, so that only the samples in use take four bytes a value.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from fairfleet.common.errors import UsageError
from fairfleet.lab.datasets.base import Array, Dataset

Preprocessing = Callable[[Array], Array]

# Per channel. The deviations are those of FedFV's code (and many others'), not the true 0.2470, 0.2435, 0.2616.
CIFAR10_MEAN, CIFAR10_DEVIATION = (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)
STANDARD_SOFTENING = 0.001  # FedFV's: pixels that never change do not divide by zero


def preprocessing(name: str, dataset: Dataset) -> Preprocessing:
    """`plain`, `unit`, `cifar10` or `standard`; what is measured, is measured on the dataset's training part."""
    if name not in MAKERS:
        raise UsageError(f"there is no preprocessing {name!r}; there are {', '.join(MAKERS)}")
    return MAKERS[name](dataset)


def plain(values: Array) -> Array:
    """As stored: whole numbers (tokens) as int64, all else as float32."""
    return values.astype(np.int64 if values.dtype.kind in "iu" else np.float32)


def unit(values: Array) -> Array:
    """Bytes to [0, 1], a grey image with one channel: what torchvision calls ToTensor."""
    scaled = values.astype(np.float32)
    if values.dtype == np.uint8:
        scaled /= np.float32(255)
    return scaled[:, None] if scaled.ndim == 3 else scaled


def per_channel(mean: tuple[float, ...], deviation: tuple[float, ...]) -> Preprocessing:
    centre, spread = (np.array(one, np.float32)[:, None, None] for one in (mean, deviation))

    def convert(values: Array) -> Array:
        scaled = unit(values)
        scaled -= centre
        scaled /= spread
        return scaled

    return convert


def standard(dataset: Dataset) -> Preprocessing:
    """Every feature (each pixel) by its own mean and deviation, on values as stored."""
    train = dataset.x[: dataset.train_size]
    if not len(train):
        raise UsageError(
            f"{dataset.name} has no training part to measure for preprocessing standard; take unit or plain"
        )
    centre = train.mean(0, dtype=np.float64).astype(np.float32)
    spread = (train.std(0, dtype=np.float64) + STANDARD_SOFTENING).astype(np.float32)
    return lambda values: (values.astype(np.float32) - centre) / spread


MAKERS: dict[str, Callable[[Dataset], Preprocessing]] = {
    "plain": lambda _: plain,
    "unit": lambda _: unit,
    "cifar10": lambda _: per_channel(CIFAR10_MEAN, CIFAR10_DEVIATION),
    "standard": standard,
}
