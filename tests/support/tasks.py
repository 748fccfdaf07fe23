"""A task with a known result: every training moves the model by exactly `shift` per parameter.

The committed model can therefore be computed from the records alone, and an update that is lost or
counted twice shows. The task can also be slow, hang, fail or diverge if configured.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import numpy as np

from fairfleet.client.softmax import SoftmaxTask
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
        loss: float = 1.0,
    ) -> None:
        self.train_samples, self.test_samples = samples, tested
        self._shift = np.float32(shift)
        self._size = size
        self._steps = steps
        self._step_seconds = step_seconds
        self._trouble = trouble
        self._target = target
        self._accuracy = accuracy
        self._loss = loss

    def initial_model(self) -> Model:
        buffers = {
            "norm.running_mean": np.zeros(2, np.float32),
            "norm.count": np.zeros((), np.int64),
        }
        return Model.of(
            {"weight": np.zeros(self._size, np.float32), "bias": np.zeros(3, np.float32)}, buffers
        )

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
        report = TrainReport(
            samples=self.train_samples,
            loss_before=self._loss,
            loss_after=0.5,
            steps=1,
            learning_rate=0.1,
        )
        return Trained(arrays, report)

    def training_loss(self, model: Arrays) -> float:
        return 0.5  # less than 1.0, the loss before, so every step is an improvement

    def evaluate(self, model: Arrays) -> Evaluation:
        if self._trouble == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        if self._trouble == "blind":
            raise RuntimeError("this task cannot evaluate")
        return Evaluation(
            samples=10, loss=float(abs(model["weight"][0] - self._target)), accuracy=self._accuracy
        )


class QuadraticTask:
    """Loss (theta - target)^2 / 2; a training goes `stride` times as far as the best step."""

    device = "test"
    train_samples = test_samples = 10

    def __init__(self, target: float, stride: float, size: int, trouble: str, trace: str) -> None:
        self._target, self._stride, self._size = target, stride, size
        self._trouble, self._trace = trouble, trace

    def initial_model(self) -> Model:
        return Model.of(
            {"weight": np.zeros(self._size, np.float32)}, {"norm.mean": np.zeros(1, np.float32)}
        )

    def train(self, model: Arrays, job: Job) -> Trained:
        weight = model["weight"] - np.float32(self._stride) * (
            model["weight"] - np.float32(self._target)
        )
        arrays = {"weight": weight, "norm.mean": np.full(1, self._target, np.float32)}
        loss = self._loss(model)
        report = TrainReport(
            samples=10, loss_before=loss, loss_after=loss, steps=1, learning_rate=0.1
        )
        return Trained(arrays, report)

    def training_loss(self, model: Arrays) -> float:
        if self._trace:
            with open(self._trace, "a") as file:
                file.write(f"{float(model['weight'][0])}\n")
        if self._trouble == "hang":
            time.sleep(600)
        if self._trouble == "fail":
            raise RuntimeError("this task cannot try a step")
        return self._loss(model)

    def evaluate(self, model: Arrays) -> Evaluation:
        return Evaluation(samples=10, loss=self._loss(model))

    def _loss(self, model: Arrays) -> float:
        return float(np.mean((model["weight"].astype(np.float64) - self._target) ** 2) / 2)


def quadratic(
    target: str = "1", stride: str = "3", size: str = "1000", trouble: str = "", trace: str = ""
) -> QuadraticTask:
    return QuadraticTask(float(target), float(stride), int(size), trouble, trace)


class WalkTask(ShiftTask):
    """Follows the plan: every step moves the model by `shift`. A sample takes a megabyte."""

    def train(self, model: Arrays, job: Job) -> Trained:
        done, planned = 0, job.plan.steps_for(self.train_samples)
        while done < planned and not (done and job.enough()):
            time.sleep(self._step_seconds)
            done += 1
            job.progress(done, planned, 1.0)
        arrays = {
            name: array - done * self._shift if array.dtype.kind == "f" else array
            for name, array in model.items()
        }
        report = TrainReport(
            samples=self.train_samples,
            loss_before=1.0,
            loss_after=0.5,
            steps=done,
            learning_rate=job.plan.learning_rate,
            gradient_norm=1.0 if job.want_gradient_norm else None,
        )
        return Trained(arrays, report)

    def fit_into(self, memory_bytes: int) -> int:
        return memory_bytes // 1_000_000


def walk(shift: str, size: str, samples: str, step_seconds: str = "0") -> WalkTask:
    return WalkTask(float(shift), int(size), int(samples), 1, float(step_seconds), "", 0.0, 0.5, 10)


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
    loss: str = "1",
) -> ShiftTask:
    if trace:
        Path(trace).touch()
    numbers = (float(shift), int(size), int(samples), int(steps), float(step_seconds))
    return ShiftTask(*numbers, trouble, float(target), float(accuracy), int(tested), float(loss))


class CountedTask(ShiftTask):
    """Records every training."""

    trace = ""

    def train(self, model: Arrays, job: Job) -> Trained:
        with open(self.trace, "a") as file:
            file.write("trained\n")
        return super().train(model, job)


def counted(trace: str, shift: str = "1", size: str = "1000", samples: str = "10") -> CountedTask:
    task = CountedTask(float(shift), int(size), int(samples), 1, 0.0, "", 0.0, 0.5, 10)
    task.trace = trace
    return task


class PeakedTask(ShiftTask):
    """Its accuracy falls with the model's distance from the target. It notes models it may keep."""

    trace = ""

    def evaluate(self, model: Arrays) -> Evaluation:
        distance = float(abs(model["weight"][0] - self._target))
        return Evaluation(samples=10, loss=distance, accuracy=max(0.0, 1 - distance / 10))

    def on_model(self, version: int, model: Arrays) -> None:
        if self.trace:
            with open(self.trace, "a") as file:
                file.write(f"{version} {model['weight'][0]:g}\n")
        if self._trouble == "ungrateful":
            raise RuntimeError("this task keeps no models")


def peaked(
    target: str,
    trace: str = "",
    trouble: str = "",
    shift: str = "1",
    size: str = "1000",
    samples: str = "10",
) -> PeakedTask:
    task = PeakedTask(
        float(shift), int(size), int(samples), 1, 0.0, trouble, float(target), 0.5, 10
    )
    task.trace = trace
    return task


class PlainTask(ShiftTask):
    """The same task without buffers, which privacy does not cover."""

    def initial_model(self) -> Model:
        return Model.of(
            {"weight": np.zeros(self._size, np.float32), "bias": np.zeros(3, np.float32)}
        )

    def train(self, model: Arrays, job: Job) -> Trained:
        trained = super().train({**model, "norm.count": np.zeros((), np.int64)}, job)
        return Trained({name: trained.arrays[name] for name in model}, trained.report)


def plain(
    shift: str = "1",
    size: str = "1000",
    samples: str = "10",
    step_seconds: str = "0",
    tested: str = "10",
) -> PlainTask:
    return PlainTask(
        float(shift),
        int(size),
        int(samples),
        1,
        float(step_seconds),
        "",
        0.0,
        0.5,
        int(tested),
        1.0,
    )


class ArrivingTask(ShiftTask):
    """Has as many training samples as a file says, and none without the file."""

    data = Path()

    def refresh(self) -> None:
        self.train_samples = int(self.data.read_text()) if self.data.exists() else 0


def arriving(data: str, shift: str = "1", size: str = "1000", samples: str = "") -> ArrivingTask:
    task = ArrivingTask(float(shift), int(size), 0, 1, 0.0, "", 0.0, 0.5, 0)
    task.data = Path(data)
    task.refresh()
    return task


def softmax(
    loss_log: str = "", size: str = "", samples: str = "3000", shift: str = ""
) -> SoftmaxTask:
    """Softmax regression that writes how each training measured its loss."""

    class LoggingTask(SoftmaxTask):
        def train(self, model: Arrays, job: Job) -> Trained:
            trained = super().train(model, job)
            if not loss_log:
                return trained
            with open(loss_log, "a") as file:
                print(trained.report.loss_measurement, trained.report.loss_after, file=file)
            return trained

    random = np.random.default_rng(0)
    count = int(samples)
    return LoggingTask((random.normal(size=(count, 4)), random.integers(0, 3, count)), classes=3)
