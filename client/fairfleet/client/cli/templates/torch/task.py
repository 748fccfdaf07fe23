"""What a client trains: a small network in PyTorch, on its own part of the data.

Replace `model`, `load_data` and the loss with your own.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from torch import nn

from fairfleet.client.torch import TorchTask

CLASSES, FEATURES = 10, 64
Features = NDArray[np.float64]
Labels = NDArray[np.int64]


def model() -> nn.Module:
    """Return the untrained network."""
    return nn.Sequential(nn.Linear(FEATURES, 32), nn.ReLU(), nn.Linear(32, CLASSES))


def task(client: str = "0", clients: str = "3", data_dir: str = "") -> TorchTask:
    """Return the task of one client; `fairfleet client -o client=1` gives the arguments."""
    x, y = load_data(int(client), int(clients), data_dir)
    cut = len(y) * 4 // 5
    return TorchTask(
        model,
        train=(x[:cut], y[:cut]),
        test=(x[cut:], y[cut:]),
        loss=nn.functional.cross_entropy,
    )


def load_data(client: int, clients: int, data_dir: str) -> tuple[Features, Labels]:
    """Return the samples of one client: one row of numbers each, and a label from 0 to 9.

    Without a folder they are a part of scikit-learn's digits. A folder has the files
    client-0.npz, client-1.npz and so on, each with the arrays x and y.
    """
    if data_dir:
        file = Path(data_dir) / f"client-{client}.npz"
        with np.load(file, allow_pickle=False) as arrays:
            return arrays["x"].reshape(len(arrays["x"]), -1), arrays["y"]
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    return x[client::clients] / 16, y[client::clients]
