"""The losses of a report, with no more passes over the data than are wanted.

`Job.measurement_before` and `Job.measurement_after` say what is wanted. A mean of the batch losses
costs no pass, and a sample costs a short one. A task of one's own can use these functions too:
they need numpy only.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from fairfleet.client.task import Job
from fairfleet.client.training.batches import Indices, sequential_batches
from fairfleet.common.errors import TaskFailed
from fairfleet.common.training_plan import LossMeasurement, Plan

GROUPS = 32  # of a sample, at least: the spread of their means gives the standard error
SAMPLE_STREAM = 1  # with the plan's seed: samples have random numbers of their own


class MeasuredLoss(NamedTuple):
    """A loss, and how it was measured."""

    loss: float
    measurement: Literal["exact", "batches", "sampled"] = "exact"
    standard_error: float | None = None  # of the loss of a sample

    def report_fields(self) -> dict[str, Any]:
        """Return the fields of `TrainReport` for a loss of the received model."""
        return {
            "loss_before": self.loss,
            "loss_measurement": self.measurement,
            "loss_standard_error": self.standard_error,
        }


class ModelMeasures(NamedTuple):
    """Measurements of one model over one data set."""

    loss: MeasuredLoss
    accuracy: float | None  # None if the task has no accuracy
    gradient_norm: float | None  # None unless requested
    samples: int  # that were measured: fewer than wanted if the pass was stopped


class Watch:
    """Reports the progress of a pass that only measures, and says when to stop it."""

    def __init__(self, job: Job, done: int, planned: int) -> None:
        """`done` of the training's `planned` steps are taken when the pass begins."""
        self._job, self._done, self._planned = job, done, planned

    def stops(self, loss: float) -> bool:
        """Report progress between two batches; return whether this machine's time is used up."""
        self._job.progress(self._done, self._planned, loss)
        return self._job.enough()


class FirstPassLoss:
    """The mean loss of the samples of the first pass's steps, each before its step.

    The losses may be numbers, or tensors on a device: nothing waits for them before `measured`.
    """

    def __init__(self, plan: Plan, samples: int) -> None:
        self._steps_left = min(plan.batches_in_epoch(samples), plan.steps_for(samples))
        self._sum: Any = 0.0
        self._samples = 0

    def add(self, loss: Any, samples: int) -> None:
        """Count the mean loss over a step's samples. Steps after the first pass are ignored."""
        if self._steps_left:
            self._steps_left -= 1
            self._sum += loss * samples
            self._samples += samples

    def measured(self) -> MeasuredLoss:
        """Return the mean over the steps so far."""
        return MeasuredLoss(float(self._sum) / max(self._samples, 1), "batches")


def measuring_order(
    job: Job, measurement: LossMeasurement, available: int, batch: int
) -> Iterable[Indices]:
    """Return the samples of each batch of a pass: all of them in order, or a random sample."""
    if measurement == "sampled":
        return sample_groups(job.plan.seed, available, job.losses.samples, batch)
    return sequential_batches(available, batch)


def mean_loss(
    measurement: LossMeasurement, losses: Sequence[float], sizes: Sequence[int], available: int
) -> MeasuredLoss:
    """Return the mean loss over a pass, from the mean and the size of each batch."""
    if measurement == "sampled":
        return loss_of_groups(losses, sizes, available)
    mean, measured = 0.0, sum(sizes)
    for loss, size in zip(losses, sizes, strict=True):  # `sum` rounds differently by version
        mean += size / measured * loss
    return MeasuredLoss(mean)


def sample_groups(seed: int, available: int, samples: int, largest: int = 512) -> list[Indices]:
    """Return a random sample without replacement, in groups of at most `largest` samples.

    The same seed gives the same sample, so losses before and after a training can be compared.
    """
    random = np.random.default_rng([seed, SAMPLE_STREAM])
    chosen = random.choice(available, min(samples, available), replace=False)
    count = max(GROUPS, -(-len(chosen) // largest))
    return np.array_split(chosen, min(count, len(chosen)))


def loss_of_groups(losses: Sequence[float], sizes: Sequence[int], available: int) -> MeasuredLoss:
    """Return the mean loss of a sample's groups, with its standard error.

    `losses` are the groups' means. A part of the groups of `sample_groups` is a sample as well.
    """
    values, weights = np.array(losses, np.float64), np.array(sizes, np.float64)
    measured = weights.sum()
    weights /= measured
    mean = float(weights @ values)
    if len(values) < 2:
        return MeasuredLoss(mean, "sampled")
    variance = float(weights @ (values - mean) ** 2) / (len(values) - 1)
    unseen = max(0.0, 1.0 - measured / available)  # a sample of everything has no error
    return MeasuredLoss(mean, "sampled", math.sqrt(variance * unseen))


def check_complete(measures: ModelMeasures, samples: int) -> None:
    """Raise TaskFailed if the time budget ended a pass that had to measure this many samples."""
    if measures.loss.measurement == "exact" and measures.samples < samples:
        raise TaskFailed(
            f"the time budget ended when {measures.samples} of {samples} samples were measured; "
            "the loss over all of them is needed. Give a larger --max-seconds, or let the "
            "server's operator set losses.before: sampled."
        )
