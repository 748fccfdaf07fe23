"""Vehicle: sound and vibration at 23 sensors along a road; which of two vehicles passes?

Each sensor is a client. The data come from one npz file in a data folder.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fairfleet.lab.datasets.base import Array, BrokenDataset, Dataset
from fairfleet.lab.datasets.files import read_pair, read_samples
from fairfleet.lab.datasets.places import Form, read_first_form

HOW_TO_GET = (
    "create train.npz with the arrays x (n x features), y (0 or 1) and client (0, 1, …) from the "
    "data of Duarte and Hu, Vehicle classification in distributed sensor networks, 2004; a part is "
    "in https://github.com/litian96/ditto"
)


def vehicle(folders: Sequence[Path]) -> Dataset:
    """Return the data with one natural client for each sensor.

    There is no published test part: hold out a part of each client's samples instead.
    """
    x, y, client = read_first_form(
        "vehicle",
        [Form(("vehicle/train.npz",), lambda paths: _read(paths[0]))],
        folders,
        HOW_TO_GET,
    )
    sensors, codes = np.unique(client, return_inverse=True)
    names = tuple(f"sensor-{number:02d}" for number in sensors)
    return Dataset(
        "vehicle",
        x.astype(np.float32),
        y.astype(np.int64),
        len(y),
        2,
        user=codes.astype(np.int64),
        user_names=names,
    )


def _read(path: Path) -> tuple[Array, Array, Array]:
    x, y = read_pair(path)
    _, client = read_samples(path, ("y", "client"))
    if client.ndim != 1 or client.dtype.kind not in "iu" or client.min(initial=0) < 0:
        raise BrokenDataset(
            f"{path} has client of {client.dtype} {client.shape}, "
            "expected an integer from 0 for each sample"
        )
    if x.dtype.kind not in "iuf" or not np.isfinite(x).all():
        raise BrokenDataset(
            f"{path} has values in x that are not finite numbers: clean or remove them first"
        )
    return x, y, client
