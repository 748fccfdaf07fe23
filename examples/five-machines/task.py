"""What a machine trains: softmax regression in numpy, on the file with its own data."""

from __future__ import annotations

import numpy as np

from fairfleet.client.softmax import SoftmaxTask

CLASSES = 10


def task(data: str = "data.npz") -> SoftmaxTask:
    """Return the task of this machine; `fairfleet client -o data=FILE` gives the argument."""
    with np.load(data, allow_pickle=False) as file:
        x, y = file["x"], file["y"]
    x = x.astype(np.float32) / max(float(x.max()), 1.0)
    cut = len(y) * 4 // 5
    return SoftmaxTask((x[:cut], y[:cut]), test=(x[cut:], y[cut:]), classes=CLASSES)
