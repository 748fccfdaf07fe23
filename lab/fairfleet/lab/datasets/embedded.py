"""The digits that come with scikit-learn, which need no data files.

`digits` is the plain dataset; `digits-rotated` is the one that the demo's ten clients share.
"""

from __future__ import annotations

import numpy as np

from fairfleet.common.errors import UsageError
from fairfleet.lab import digits as embedded
from fairfleet.lab.datasets.base import Dataset

CLASS_NAMES = tuple("0123456789")


def digits() -> Dataset:
    """Return 1,797 images of 8 by 8 pixels between 0 and 1.

    The dataset has neither natural clients nor a published test part.
    """
    x, y = embedded.images()
    return Dataset("digits", x, y, len(y), embedded.CLASSES, class_names=CLASS_NAMES)


def digits_rotated(seed: int = embedded.SEED) -> Dataset:
    """Return the data of the demo's ten clients, two of which have rotated images.

    The 70/30 splits of the clients are the published training and test parts.
    """
    if seed < 0:
        raise UsageError(f"digits-rotated needs a seed from 0; found {seed}")
    shards = embedded.partition(*embedded.images(), seed).values()
    train, test = [shard[:2] for shard in shards], [shard[2:] for shard in shards]
    return Dataset(
        name="digits-rotated",
        x=np.concatenate([x for x, _ in train + test]),
        y=np.concatenate([y for _, y in train + test]),
        train_size=sum(len(y) for _, y in train),
        classes=embedded.CLASSES,
        user=np.concatenate(
            [np.full(len(y), n) for part in (train, test) for n, (_, y) in enumerate(part)]
        ),
        user_names=embedded.CLIENTS,
        class_names=CLASS_NAMES,
    )
