"""Vehicle: sound and vibration at 23 sensors of a road, each a client; which of two vehicles passes?"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fairfleet.lab.datasets.base import Dataset
from fairfleet.lab.datasets.files import read_samples
from fairfleet.lab.datasets.places import Form, find

HOW_TO_GET = (
    "make train.npz with the arrays x (n x features), y (0 or 1) and client (0, 1, …) from the data of Duarte and Hu, "
    "Vehicle classification in distributed sensor networks, 2004; a part is in https://github.com/litian96/ditto"
)


def vehicle(folders: Sequence[Path]) -> Dataset:
    """A published test part is not at hand: hold a part of each client out."""
    form = Form(("vehicle/train.npz",), lambda paths: read_samples(paths[0], ("x", "y", "client")))
    x, y, client = find("vehicle", [form], folders, HOW_TO_GET)
    names = tuple(f"sensor-{number:02d}" for number in range(int(client.max()) + 1))
    return Dataset(
        "vehicle", x.astype(np.float32), y.astype(np.int64), len(y), 2, user=client.astype(np.int64), user_names=names
    )
