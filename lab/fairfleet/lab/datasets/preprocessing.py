"""The conversions of stored values to float32 that the papers use, by name.

Statistics (a mean, a deviation) are measured once over the training part of a dataset. The
conversion itself is applied to any part of the data, so that only the samples in use take four
bytes a value.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from fairfleet.common.errors import UsageError
from fairfleet.lab.datasets.base import Array, Dataset

Preprocessing = Callable[[Array], Array]

# Per channel. The deviations are those of FedFV's code and of many other programs. The true ones
# are 0.2470, 0.2435 and 0.2616.
CIFAR10_MEAN, CIFAR10_DEVIATION = (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)
STANDARD_SOFTENING = 0.001  # FedFV's; avoids a division by zero for constant pixels.


def preprocessing(name: str, dataset: Dataset) -> Preprocessing:
    """Return the conversion `plain`, `unit`, `cifar10` or `standard` for this dataset.

    Statistics come from the dataset's training part. Raises UsageError for another name.
    """
    if name not in MAKERS:
        raise UsageError(f"there is no preprocessing {name!r}; there are {', '.join(MAKERS)}")
    return MAKERS[name](dataset)


def plain(values: Array) -> Array:
    """Keep the stored values: integers (tokens) as int64, all others as float32."""
    return values.astype(np.int64 if values.dtype.kind in "iu" else np.float32)


def unit(values: Array) -> Array:
    """Scale bytes to [0, 1] and give grey images one channel, as torchvision's ToTensor does."""
    scaled = values.astype(np.float32)
    if values.dtype == np.uint8:
        scaled /= np.float32(255)
    return scaled[:, None] if scaled.ndim == 3 else scaled


def per_channel(mean: tuple[float, ...], deviation: tuple[float, ...]) -> Preprocessing:
    """Return a conversion to [0, 1] and then by the mean and deviation of each channel."""
    centre, spread = (np.array(values, np.float32)[:, None, None] for values in (mean, deviation))

    def _convert(values: Array) -> Array:
        scaled = unit(values)
        scaled -= centre
        scaled /= spread
        return scaled

    return _convert


def standard(dataset: Dataset) -> Preprocessing:
    """Return a conversion of stored values by the mean and deviation of each feature (pixel).

    Raises UsageError if the dataset has no training part to measure.
    """
    train = dataset.x[: dataset.train_size]
    if not len(train):
        raise UsageError(
            f"{dataset.name} has no training part to measure for preprocessing standard; "
            "use unit or plain"
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
