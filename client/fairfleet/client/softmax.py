"""Softmax regression in numpy: a task for boards without room for a framework, and for the demo.

It follows the whole plan as `TorchTask` does: same batches, same solvers, same report. Its tensors
are `linear.weight` (classes by features) and `linear.bias`, in the layout of torch's Linear.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fairfleet.client.task import Job, Trained
from fairfleet.client.training.batches import batches, sequential_batches
from fairfleet.client.training.losses import (
    FirstPassLoss,
    ModelMeasures,
    Watch,
    check_complete,
    measuring_order,
)
from fairfleet.client.training.numpy_solvers import Descent
from fairfleet.client.training.softmax_regression import (
    MEASURE_BATCH,
    LabelledSamples,
    SoftmaxRegression,
    measure,
)
from fairfleet.common.errors import UsageError
from fairfleet.common.reports import Evaluation, TrainReport
from fairfleet.common.tensors import Arrays, Model
from fairfleet.common.training_plan import LossMeasurement

Pair = tuple[ArrayLike, ArrayLike]


class SoftmaxTask:
    """A task that trains softmax regression with numpy only.

    `train` and `test` are pairs (features, labels). Features have one row per sample; further
    dimensions are flattened. Labels are integers from 0 to `classes` - 1. Without `test`, the
    client is never selected for evaluation. Either may be a function that returns the pair: it is
    called again before each training, so data may arrive later. `features` is the number of
    features per sample, needed if there are no samples at first. Raises UsageError if the data do
    not fit together.

    Example:

        task = SoftmaxTask((images, labels), test=(test_images, test_labels), classes=10)
    """

    device = "cpu"

    def __init__(
        self,
        train: Pair | Callable[[], Pair],
        *,
        classes: int,
        test: Pair | Callable[[], Pair] | None = None,
        features: int | None = None,
    ) -> None:
        self._data, self._classes, self._features = (train, test), classes, features
        self._read_data()

    def _read_data(self) -> None:
        train, test = self._data
        own = self._samples("training", train)
        self._features = own.features.shape[1]  # later data must have as many
        self._test = self._samples("test", test) if test is not None else None
        self._train = own
        self._shape = (self._classes, self._features)
        self.train_samples = len(own.labels)
        self.test_samples = len(self._test.labels) if self._test else 0
        if not self.train_samples and not callable(train):
            raise UsageError(
                "the training set is empty; a client needs at least one sample to take part. If "
                "data arrive later, give a function that loads them, as SoftmaxTask(load, …)"
            )

    def _samples(self, kind: str, data: Pair | Callable[[], Pair]) -> LabelledSamples:
        return samples_of(kind, data() if callable(data) else data, self._classes, self._features)

    def refresh(self) -> None:
        """Call the functions that load the data again, if there are any."""
        if any(map(callable, self._data)):
            self._read_data()

    def initial_model(self) -> Model:
        """Return a model of zeros."""
        return Model.of(
            {
                "linear.weight": np.zeros(self._shape, np.float32),
                "linear.bias": np.zeros(self._shape[0], np.float32),
            }
        )

    def train(self, model: Arrays, job: Job) -> Trained:
        """Train the received model as the plan says, and measure what the job wants to know.

        Raises TaskFailed if the loss is not finite.
        """
        started, planned = time.perf_counter(), job.plan.steps_for(self.train_samples)
        trained = self._received(model)
        before = self._before(trained, job)
        first_pass = FirstPassLoss(job.plan, self.train_samples)
        steps = self._descend(trained, job, first_pass)
        loss = before.loss if before else first_pass.measured()
        report = TrainReport(
            **loss.report_fields(),
            samples=self.train_samples,
            loss_after=self._after(trained, job, Watch(job, steps, planned)),
            steps=steps,
            learning_rate=job.plan.learning_rate,
            gradient_norm=before.gradient_norm if before else None,
            seconds=time.perf_counter() - started,
            accuracy=before.accuracy if before else None,
        )
        return Trained(trained.named(), report)

    def evaluate(self, model: Arrays) -> Evaluation:
        """Return the loss and the accuracy on the test set. Raises UsageError without one."""
        if self._test is None:
            raise UsageError(
                "this task has no test set to evaluate on; give one as SoftmaxTask(…, test=…)"
            )
        order = sequential_batches(self.test_samples, MEASURE_BATCH)
        measures = measure(self._received(model), self._test, order)
        return Evaluation(
            samples=self.test_samples, loss=measures.loss.loss, accuracy=measures.accuracy
        )

    def training_loss(self, model: Arrays) -> float:
        """Return the mean cross-entropy over all training samples."""
        order = sequential_batches(self.train_samples, MEASURE_BATCH)
        return measure(self._received(model), self._train, order).loss.loss

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

    def _before(self, model: Model, job: Job) -> ModelMeasures | None:
        """Measure the received model; None if its loss is that of the first pass's batches."""
        measurement = job.measurement_before(self.train_samples)
        if measurement == "batches":
            return None
        watch = Watch(job, 0, job.plan.steps_for(self.train_samples))
        measures = self._measure(model, job, measurement, watch, job.want_gradient_norm)
        check_complete(measures, self.train_samples)
        return measures

    def _after(self, model: Model, job: Job, watch: Watch) -> float | None:
        """Return the loss of the trained model, if it is wanted and there is time for it."""
        measurement = job.measurement_after(self.train_samples)
        if measurement == "none":
            return None
        measures = self._measure(model, job, measurement, watch)
        is_complete = measurement == "sampled" or measures.samples == self.train_samples
        return measures.loss.loss if is_complete else None

    def _measure(
        self,
        model: Model,
        job: Job,
        measurement: LossMeasurement,
        watch: Watch,
        want_gradient: bool = False,
    ) -> ModelMeasures:
        order = measuring_order(job, measurement, self.train_samples, MEASURE_BATCH)
        return measure(
            model, self._train, order, measurement, want_gradient=want_gradient, watch=watch
        )

    def _descend(self, model: Model, job: Job, first_pass: FirstPassLoss) -> int:
        """Train the model in place and return the number of steps taken."""
        anchor = model if job.anchor is None else self._received(job.anchor)
        descent = Descent(job.plan, model.parameters, anchor.parameters)
        planned = job.plan.steps_for(self.train_samples)
        regression = SoftmaxRegression(model)
        for done, indices in enumerate(batches(job.plan, self.train_samples), start=1):
            batch = self._train.selected(indices)
            loss, gradient = regression.loss_and_gradient(batch)
            first_pass.add(loss, len(indices))
            descent.step(gradient)
            job.progress(done, planned, loss)
            if job.enough():
                return done
        return planned


def samples_of(
    kind: str, pair: Pair, classes: int, expected_features: int | None = None
) -> LabelledSamples:
    """Return the samples of a pair (features, labels); `kind` names them in messages.

    Raises UsageError if the two do not fit together, or have another number of features.
    """
    features, labels = (np.asarray(part) for part in pair)
    if len(features) != len(labels):
        raise UsageError(
            f"the {kind} set has {len(features)} samples but {len(labels)} labels; "
            "expected one label per sample"
        )
    _check_labels(kind, labels, classes)
    width = math.prod(features.shape[1:])
    if not len(labels) and features.ndim < 2:  # an empty list does not say how many features
        if expected_features is None:
            raise UsageError(
                f"the {kind} set is empty, so it does not say how many features a sample has; "
                "give their number, as SoftmaxTask(…, features=784)"
            )
        width = expected_features
    if expected_features not in (None, width):
        raise UsageError(
            f"the samples of the {kind} set have {width} features; expected {expected_features}"
        )
    return LabelledSamples(
        features.reshape(len(features), width).astype(np.float32), labels.astype(np.intp)
    )


def _check_labels(kind: str, labels: NDArray[Any], classes: int) -> None:
    if len(labels) and (
        labels.dtype.kind not in "iu" or labels.min() < 0 or labels.max() >= classes
    ):
        raise UsageError(
            f"the {kind} set's labels are {labels.dtype} from {labels.min()} to {labels.max()}; "
            f"with classes={classes} they must be integers from 0 to {classes - 1}"
        )
