"""Vehicle: sound and vibration at 23 sensors of a road, each a client; which of two vehicles passes?"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fairfleet.lab.datasets.base import Array, BrokenDataset, Dataset
from fairfleet.lab.datasets.files import read_pair, read_samples
from fairfleet.lab.datasets.places import Form, find

HOW_TO_GET = (
    "make train.npz with the arrays x (n x features), y (0 or 1) and client (0, 1, …) from the data of Duarte and Hu, "
    "Vehicle classification in distributed sensor networks, 2004; a part is in https://github.com/litian96/ditto"
)


def vehicle(folders: Sequence[Path]) -> Dataset:
    """A published test part is not at hand: hold a part of each client out."""
    x, y, client = find("vehicle", [Form(("vehicle/train.npz",), lambda paths: _read(paths[0]))], folders, HOW_TO_GET)
    sensors, codes = np.unique(client, return_inverse=True)
    names = tuple(f"sensor-{number:02d}" for number in sensors)
    return Dataset(
        "vehicle", x.astype(np.float32), y.astype(np.int64), len(y), 2, user=codes.astype(np.int64), user_names=names
    )


def _read(path: Path) -> tuple[Array, Array, Array]:
    x, y = read_pair(path)
    _, client = read_samples(path, ("y", "client"))
    if client.ndim != 1 or client.dtype.kind not in "iu" or client.min(initial=0) < 0:
        raise BrokenDataset(f"{path} has client of {client.dtype} {client.shape}, expected a number from 0 per sample")
    if x.dtype.kind not in "iuf" or not np.isfinite(x).all():
        raise BrokenDataset(f"{path} has values in x that are not finite numbers: clean them first, or leave them out")
    return x, y, client
