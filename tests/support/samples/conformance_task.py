"""A task for `fairfleet conformance`: it has the model of that command, and follows the plan.

The loss of a sample is the mean squared distance of the parameters to a constant of this sample, so
a step on 600,000 parameters takes no time.
"""

from __future__ import annotations

import numpy as np

from fairfleet.client.task import Job, Trained
from fairfleet.client.training.batches import batches
from fairfleet.client.training.numpy_solvers import Descent
from fairfleet.common.reports import Evaluation, TrainReport
from fairfleet.common.tensors import Arrays, Model
from fairfleet.server.conformance.bench import several_chunks_model


class ConstantsTask:
    device = "test"

    def __init__(self, samples: int, tested: int) -> None:
        self.train_samples, self.test_samples = samples, tested
        self._targets = np.linspace(-1, 1, samples, dtype=np.float32) + 0.3

    def initial_model(self) -> Model:
        return several_chunks_model()

    def train(self, model: Arrays, job: Job) -> Trained:
        weight = model["weight"].copy().reshape(-1)
        descent, planned = Descent(job.plan, weight, weight), job.plan.steps_for(self.train_samples)
        for done, indices in enumerate(batches(job.plan, self.train_samples), start=1):
            descent.step(weight - self._targets[indices].mean())
            job.progress(done, planned, float(weight[0]))
        arrays = {
            "weight": weight.reshape(model["weight"].shape),
            "mean": model["mean"] + np.float32(1),
            "steps": model["steps"] + planned,
        }
        report = TrainReport(
            samples=self.train_samples,
            loss_before=self.training_loss(model),
            loss_after=self.training_loss(arrays),
            steps=planned,
            learning_rate=job.plan.learning_rate,
        )
        return Trained(arrays, report)

    def training_loss(self, model: Arrays) -> float:
        weight = model["weight"].astype(np.float64)
        return float(weight.var() + np.mean((weight.mean() - self._targets) ** 2)) / 2

    def evaluate(self, model: Arrays) -> Evaluation:
        return Evaluation(samples=self.test_samples, loss=self.training_loss(model))


def constants(samples: int = 20, tested: int = 5) -> ConstantsTask:
    return ConstantsTask(samples, tested)


class MiscountingTask(ConstantsTask):
    """It reports a step too many, as a client does that trains the single last sample alone."""

    def train(self, model: Arrays, job: Job) -> Trained:
        trained = super().train(model, job)
        report = trained.report.model_copy(update={"steps": trained.report.steps + 1})
        return Trained(trained.arrays, report)


class MismeasuringTask(ConstantsTask):
    """Its loss before the training is not that which its method returns for the same model."""

    def train(self, model: Arrays, job: Job) -> Trained:
        trained = super().train(model, job)
        loss = trained.report.loss_before + 1.0
        return Trained(trained.arrays, trained.report.model_copy(update={"loss_before": loss}))


class UnmeasuringTask:
    """It has no `training_loss`, so it cannot verify steps."""

    device = "test"

    def __init__(self) -> None:
        self._task = ConstantsTask(20, 0)
        self.train_samples, self.test_samples = 20, 0

    def initial_model(self) -> Model:
        return self._task.initial_model()

    def train(self, model: Arrays, job: Job) -> Trained:
        return self._task.train(model, job)

    def evaluate(self, model: Arrays) -> Evaluation:
        return self._task.evaluate(model)


def miscounting() -> ConstantsTask:
    return MiscountingTask(20, 0)


def mismeasuring() -> ConstantsTask:
    return MismeasuringTask(20, 0)


def unmeasuring() -> UnmeasuringTask:
    return UnmeasuringTask()
