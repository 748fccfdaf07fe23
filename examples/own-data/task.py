"""What a client trains: softmax regression on the file of this client."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fairfleet.client.softmax import SoftmaxTask
from fairfleet.common.errors import UsageError

CLASSES = 10


def task(client: str = "0", clients: str = "5", data_dir: str = "data") -> SoftmaxTask:
    """Return the task of one client; `fairfleet client -o client=1` gives the arguments."""
    file = Path(data_dir) / f"client-{client}.npz"
    if not file.exists():
        raise UsageError(
            f"there is no {file}; write the data of {clients} clients with "
            f"`python prepare.py --clients {clients} --output {data_dir}`"
        )
    with np.load(file, allow_pickle=False) as data:
        x, y = data["x"], data["y"]
    x = x.astype(np.float32) / max(float(x.max()), 1.0)
    order = np.random.default_rng(0).permutation(len(y))
    train, test = np.split(order, [len(y) * 4 // 5])
    return SoftmaxTask((x[train], y[train]), test=(x[test], y[test]), classes=CLASSES)
