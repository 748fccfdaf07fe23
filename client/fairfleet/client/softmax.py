"""Softmax regression in numpy: a task for boards without room for a framework, and for the demo.

It follows the whole plan as `TorchTask` does: same batches, same solvers, same report. Its tensors
are `linear.weight` (classes by features) and `linear.bias`, in the layout of torch's Linear.
"""

from __future__ import annotations

import math
import time
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fairfleet.client.task import Job, Trained
from fairfleet.client.training.batches import batches
from fairfleet.client.training.numpy_solvers import Descent
from fairfleet.common.errors import TaskFailed, UsageError
from fairfleet.common.reports import Evaluation, TrainReport
from fairfleet.common.tensors import Arrays, Model, Vector


class LabelledSamples(NamedTuple):
    """Samples of one data set: one row of features and one label each."""

    features: NDArray[np.float32]
    labels: NDArray[np.intp]


class SoftmaxTask:
    """A task that trains softmax regression with numpy only.

    `train` and `test` are pairs (features, labels). Features have one row per sample; further
    dimensions are flattened. Labels are integers from 0 to `classes` - 1. Without `test`, the
    client is never selected for evaluation. Raises UsageError if the data do not fit together.

    Example:

        task = SoftmaxTask((images, labels), test=(test_images, test_labels), classes=10)
    """

    device = "cpu"

    def __init__(
        self,
        train: tuple[ArrayLike, ArrayLike],
        *,
        classes: int,
        test: tuple[ArrayLike, ArrayLike] | None = None,
    ) -> None:
        self._train = _samples("training", train, classes)
        self._shape = (classes, self._train.features.shape[1])
        self._test = _samples("test", test, classes) if test else None
        self.train_samples = len(self._train.labels)
        self.test_samples = len(self._test.labels) if self._test else 0
        if not self.train_samples:
            raise UsageError(
                "the training set is empty; a client needs at least one sample to take part"
            )

    def initial_model(self) -> Model:
        """Return a model of zeros."""
        return Model.of(
            {
                "linear.weight": np.zeros(self._shape, np.float32),
                "linear.bias": np.zeros(self._shape[0], np.float32),
            }
        )

    def train(self, model: Arrays, job: Job) -> Trained:
        """Train the received model as the plan says, and measure it before and after.

        Raises TaskFailed if the loss is not finite.
        """
        started = time.perf_counter()
        trained = self._received(model)
        loss_before, gradient = _loss_and_gradient(trained, self._train)
        accuracy = _accuracy(trained, self._train)
        steps = self._descend(trained, job)
        loss_after, _ = _loss_and_gradient(trained, self._train)
        report = TrainReport(
            samples=self.train_samples,
            loss_before=loss_before,
            loss_after=loss_after,
            steps=steps,
            learning_rate=job.plan.learning_rate,
            gradient_norm=float(np.linalg.norm(gradient)) if job.want_gradient_norm else None,
            seconds=time.perf_counter() - started,
            accuracy=accuracy,
        )
        return Trained(trained.named(), report)

    def evaluate(self, model: Arrays) -> Evaluation:
        """Return the loss and the accuracy on the test set. Raises UsageError without one."""
        if self._test is None:
            raise UsageError(
                "this task has no test set to evaluate on; give one as SoftmaxTask(…, test=…)"
            )
        received = self._received(model)
        loss, _ = _loss_and_gradient(received, self._test)
        return Evaluation(
            samples=self.test_samples, loss=loss, accuracy=_accuracy(received, self._test)
        )

    def training_loss(self, model: Arrays) -> float:
        """Return the mean cross-entropy over all training samples."""
        return _loss_and_gradient(self._received(model), self._train)[0]

    def fit_into(self, memory_bytes: int) -> int:
        """Return the largest batch for which one step fits into this much memory."""
        classes, width = (int(size) for size in self._shape)
        # Each sample needs its features, logits, log-probabilities, exponentials and errors.
        bytes_per_sample = 4 * (width + 4 * classes)
        # Model, anchor, gradient and velocity do not depend on the batch.
        fixed_bytes = 4 * 4 * classes * (width + 1)
        return max(0, memory_bytes - fixed_bytes) // bytes_per_sample

    def _received(self, model: Arrays) -> Model:
        received = self.initial_model()
        received.assign(model)
        return received

    def _descend(self, model: Model, job: Job) -> int:
        """Train the model in place and return the number of steps taken."""
        anchor = model if job.anchor is None else self._received(job.anchor)
        descent = Descent(job.plan, model.parameters, anchor.parameters)
        planned = job.plan.steps_for(self.train_samples)
        for done, indices in enumerate(batches(job.plan, self.train_samples), start=1):
            batch = LabelledSamples(self._train.features[indices], self._train.labels[indices])
            loss, gradient = _loss_and_gradient(model, batch)
            descent.step(gradient)
            job.progress(done, planned, loss)
            if job.enough():
                return done
        return planned


def _samples(kind: str, pair: tuple[ArrayLike, ArrayLike], classes: int) -> LabelledSamples:
    features, labels = (np.asarray(part) for part in pair)
    if len(features) != len(labels):
        raise UsageError(
            f"the {kind} set has {len(features)} samples but {len(labels)} labels; "
            "expected one label per sample"
        )
    if len(labels) and (
        labels.dtype.kind not in "iu" or labels.min() < 0 or labels.max() >= classes
    ):
        raise UsageError(
            f"the {kind} set's labels are {labels.dtype} from {labels.min()} to {labels.max()}; "
            f"with classes={classes} they must be integers from 0 to {classes - 1}"
        )
    width = math.prod(features.shape[1:])
    return LabelledSamples(
        features.reshape(len(features), width).astype(np.float32), labels.astype(np.intp)
    )


def _logits(model: Model, features: NDArray[np.float32]) -> NDArray[Any]:
    named = model.named()
    logits: NDArray[Any] = features @ named["linear.weight"].T + named["linear.bias"]
    return logits


def _accuracy(model: Model, samples: LabelledSamples) -> float:
    return float((_logits(model, samples.features).argmax(1) == samples.labels).mean())


def _loss_and_gradient(model: Model, samples: LabelledSamples) -> tuple[float, Vector]:
    """Return the mean cross-entropy, and its gradient in the layout of the model's flat vector."""
    logits = _logits(model, samples.features)
    logits -= logits.max(1, keepdims=True)  # keeps the exponentials finite
    log_probabilities = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    rows = np.arange(len(samples.labels))
    loss = -float(log_probabilities[rows, samples.labels].mean())
    if not math.isfinite(loss):
        raise TaskFailed(
            f"the loss is {loss}: training diverged; a smaller learning_rate in the plan may help"
        )
    error = np.exp(log_probabilities)
    error[rows, samples.labels] -= 1.0
    error /= len(rows)
    return loss, np.concatenate([(error.T @ samples.features).ravel(), error.sum(0)])
