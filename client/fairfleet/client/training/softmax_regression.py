"""The arithmetic of softmax regression in numpy: losses, gradients and accuracy of one model.

A model has the tensors `linear.weight` (classes by features) and `linear.bias`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fairfleet.client.training.batches import Indices
from fairfleet.client.training.losses import ModelMeasures, Watch, mean_loss
from fairfleet.common.errors import TaskFailed
from fairfleet.common.tensors import Model, Vector
from fairfleet.common.training_plan import LossMeasurement

MEASURE_BATCH = 8192  # samples of a pass that only measures; smaller data sets take one batch


class LabelledSamples(NamedTuple):
    """Samples of one data set: one row of features and one label each."""

    features: NDArray[np.float32]
    labels: NDArray[np.intp]

    def of(self, indices: Indices) -> LabelledSamples:
        """Return the samples with these indices; all of them, in order, are not copied."""
        if len(indices) == len(self.labels) and bool((np.diff(indices) == 1).all()):
            return self
        return self.selected(indices)

    def selected(self, indices: Indices) -> LabelledSamples:
        """Return copies of the samples with these indices."""
        return LabelledSamples(self.features.take(indices, 0), self.labels.take(indices))


class SoftmaxRegression:
    """A model and views of its two tensors, which see every change of the model."""

    def __init__(self, model: Model) -> None:
        named = model.named()
        self._weight, self._bias = named["linear.weight"], named["linear.bias"]

    def log_probabilities(self, samples: LabelledSamples) -> NDArray[Any]:
        """Return the logarithm of each class's probability, one row per sample."""
        logits: NDArray[Any] = samples.features @ self._weight.T + self._bias
        # The reductions of numpy's functions, without what surrounds them in its methods.
        logits -= np.maximum.reduce(logits, 1, keepdims=True)  # keeps the exponentials finite
        sums = np.add.reduce(np.exp(logits), 1, keepdims=True)
        log_probabilities: NDArray[Any] = logits - np.log(sums)
        return log_probabilities

    def loss_and_gradient(self, samples: LabelledSamples) -> tuple[float, Vector]:
        """Return the mean cross-entropy, and its gradient in the layout of the flat vector."""
        log_probabilities = self.log_probabilities(samples)
        return loss_of(log_probabilities, samples), gradient_of(log_probabilities, samples)


def loss_of(log_probabilities: NDArray[Any], samples: LabelledSamples) -> float:
    """Return the mean cross-entropy. Raises TaskFailed if it is not finite."""
    own = log_probabilities[np.arange(len(samples.labels)), samples.labels]
    loss = -float(np.add.reduce(own) / own.dtype.type(len(own)))  # `mean`, but faster
    if not math.isfinite(loss):
        raise TaskFailed(
            f"the loss is {loss}: training diverged; a smaller learning_rate in the plan may help"
        )
    return loss


def gradient_of(log_probabilities: NDArray[Any], samples: LabelledSamples) -> Vector:
    """Return the gradient of the mean cross-entropy in the layout of the model's flat vector."""
    error = np.exp(log_probabilities)
    error[np.arange(len(error)), samples.labels] -= 1.0
    error /= len(error)
    classes, width = error.shape[1], samples.features.shape[1]
    gradient = np.empty(classes * (width + 1), np.float32)
    np.matmul(error.T, samples.features, out=gradient[:-classes].reshape(classes, width))
    np.add.reduce(error, 0, out=gradient[-classes:])
    return gradient


def measure(
    model: Model,
    samples: LabelledSamples,
    order: Iterable[Indices],
    measurement: LossMeasurement = "exact",
    *,
    want_gradient: bool = False,
    watch: Watch | None = None,
) -> ModelMeasures:
    """Measure a model over the batches of `order`; `watch` may stop the pass between them."""
    regression, right = SoftmaxRegression(model), 0
    losses, sizes, gradients = list[float](), list[int](), list[Vector]()
    for indices in order:
        if losses and watch and watch.stops(losses[-1]):
            break
        batch = samples.of(indices)
        log_probabilities = regression.log_probabilities(batch)
        losses.append(loss_of(log_probabilities, batch))
        sizes.append(len(indices))
        right += int((log_probabilities.argmax(1) == batch.labels).sum())
        if want_gradient:
            gradients.append(gradient_of(log_probabilities, batch))
    norm = _gradient_norm(gradients, sizes) if want_gradient else None
    loss = mean_loss(measurement, losses, sizes, len(samples.labels))
    return ModelMeasures(loss, right / sum(sizes), norm, sum(sizes))


def _gradient_norm(gradients: list[Vector], sizes: list[int]) -> float:
    """Return the norm of the mean gradient."""
    measured, total = sum(sizes), np.zeros(1, np.float32)
    for gradient, size in zip(gradients, sizes, strict=True):
        total = total + np.float32(size / measured) * gradient
    return float(np.linalg.norm(total))
