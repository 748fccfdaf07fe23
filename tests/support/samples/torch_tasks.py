"""Small TorchTasks, and comparisons of what they trained."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from fairfleet.client.torch import TorchTask
from fairfleet.common.tensors import Arrays

# On a busy machine the threads of small models wait for each other for seconds.
torch.set_num_threads(1)

random = np.random.default_rng(2)


X = random.normal(size=(33, 5)).astype(np.float32)


Y = random.integers(0, 3, 33)


def normalised() -> nn.Module:
    return nn.Sequential(
        nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 3)
    )


def linear() -> nn.Module:
    return nn.Linear(5, 3)


def task(model: Any = linear, **options: Any) -> TorchTask:
    usual: dict[str, Any] = {
        "train": (X, Y),
        "test": (X[:9], Y[:9]),
        "loss": cross_entropy,
        "device": "cpu",
    }
    return TorchTask(model, **{**usual, **options})


def same(first: Arrays, second: Arrays) -> bool:
    return first.keys() == second.keys() and all(
        np.array_equal(first[name], second[name]) for name in first
    )


def moved(before: Arrays, after: Arrays) -> set[str]:
    return {name for name in before if not np.array_equal(before[name], after[name])}
