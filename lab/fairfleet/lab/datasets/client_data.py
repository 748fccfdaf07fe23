"""The data of one simulated client: what it trains on, and what it is evaluated on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Labels = NDArray[np.int64]


@dataclass(frozen=True)
class ClientData:
    """One client's samples, ready for a model: x in float32 (int64 for tokens), y in int64."""

    name: str
    train_x: NDArray[Any]
    train_y: Labels
    test_x: NDArray[Any]
    test_y: Labels
    true_y: Labels | None = None  # right training labels, if train_y has label noise
