"""A task whose result is known beforehand: every training moves the model by exactly `shift` per parameter.

So the committed model can be computed from the records alone, and any update that was lost or counted
twice shows. It can also be slow, hang, fail or diverge when told so.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import numpy as np

from fairfleet.client.task import Job, Trained
from fairfleet.common.reports import Evaluation, TrainReport
from fairfleet.common.tensors import Arrays, Model


class ShiftTask:
    device = "test"

    def __init__(
        self,
        shift: float,
        size: int,
        samples: int,
        steps: int,
        step_seconds: float,
        trouble: str,
        target: float,
        accuracy: float,
        tested: int,
    ) -> None:
        self.train_samples, self.test_samples = samples, tested
        self._shift = np.float32(shift)
        self._size = size
        self._steps = steps
        self._step_seconds = step_seconds
        self._trouble = trouble
        self._target = target
        self._accuracy = accuracy

    def initial_model(self) -> Model:
        buffers = {"norm.running_mean": np.zeros(2, np.float32), "norm.count": np.zeros((), np.int64)}
        return Model.of({"weight": np.zeros(self._size, np.float32), "bias": np.zeros(3, np.float32)}, buffers)

    def train(self, model: Arrays, job: Job) -> Trained:
        if self._trouble == "hang":
            time.sleep(600)
        if self._trouble == "fail":
            raise RuntimeError("this task always fails")
        for step in range(self._steps):
            time.sleep(self._step_seconds)
            job.progress(step + 1, self._steps, 1.0)
        shift = np.float32("nan") if self._trouble == "nan" else self._shift
        arrays = {
            "weight": model["weight"] - shift,
            "bias": model["bias"] - shift,
            "norm.running_mean": np.full(2, self._shift, np.float32),
            "norm.count": model["norm.count"] + self.train_samples,
        }
        report = TrainReport(samples=self.train_samples, loss_before=1.0, loss_after=0.5, steps=1, learning_rate=0.1)
        return Trained(arrays, report)

    def evaluate(self, model: Arrays) -> Evaluation:
        if self._trouble == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        if self._trouble == "blind":
            raise RuntimeError("this task cannot evaluate")
        return Evaluation(samples=10, loss=float(abs(model["weight"][0] - self._target)), accuracy=self._accuracy)


def shift(
    shift: str = "1",
    size: str = "1000",
    samples: str = "10",
    steps: str = "1",
    step_seconds: str = "0",
    trouble: str = "",
    trace: str = "",
    target: str = "0",
    accuracy: str = "0.5",
    tested: str = "10",
) -> ShiftTask:
    if trace:
        Path(trace).touch()
    numbers = (float(shift), int(size), int(samples), int(steps), float(step_seconds))
    return ShiftTask(*numbers, trouble, float(target), float(accuracy), int(tested))
