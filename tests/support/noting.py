"""The demo's numpy task, which also records the models that it is given, for comparisons."""

from __future__ import annotations

import hashlib
import platform
from pathlib import Path
from typing import Any

import numpy as np

from fairfleet.client.softmax import SoftmaxTask
from fairfleet.client.task import Job, Task, Trained
from fairfleet.common.tensors import Arrays
from fairfleet.lab import digits


class Noting:
    """A base class that comes before a task among the bases."""

    notes = ""

    def train(self, model: Arrays, job: Job) -> Trained:
        digest = hashlib.sha256()
        for name in sorted(model):
            digest.update(name.encode() + np.ascontiguousarray(model[name]).tobytes())
        with open(self.notes, "a") as file:
            file.write(f"{platform.machine()} {digest.hexdigest()}\n")
        return super().train(model, job)  # type: ignore[misc, no-any-return]


class NotingSoftmax(Noting, SoftmaxTask):
    pass


def task(shard: str, data: str, notes: str) -> Task:
    own = digits.read_shard(Path(data), digits.client_name(shard))
    train, test = (own.train_images, own.train_labels), (own.test_images, own.test_labels)
    noting_task = NotingSoftmax(train, test=test, classes=digits.CLASSES)
    noting_task.notes = notes
    return noting_task


def torch_task(shard: str, data: str, notes: str) -> Task:
    noting_task: Any = digits.torch_mlp(shard, data)
    noting_task.__class__ = type("NotingTorch", (Noting, type(noting_task)), {})
    noting_task.notes = notes
    task: Task = noting_task
    return task
