"""A simulated client is its data: what it trains on, and what it is judged by."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Labels = NDArray[np.int64]


@dataclass(frozen=True)
class ClientData:
    """One client's own samples, ready for a model: x in float32 (int64 where it is tokens), y in int64."""

    name: str
    train_x: NDArray[Any]
    train_y: Labels
    test_x: NDArray[Any]
    test_y: Labels
