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
        return LabelledSamples(self.features[indices], self.labels[indices])


class BatchResult(NamedTuple):
    """What one batch says of a model."""

    loss: float  # mean cross-entropy
    accuracy: float
    gradient: Vector | None  # in the layout of the model's flat vector


def evaluate_batch(model: Model, samples: LabelledSamples, *, gradient: bool) -> BatchResult:
    """Return loss and accuracy over a batch, and the gradient if it is wanted.

    Raises TaskFailed if the loss is not finite.
    """
    named, rows = model.named(), np.arange(len(samples.labels))
    logits: NDArray[Any] = samples.features @ named["linear.weight"].T + named["linear.bias"]
    accuracy = float((logits.argmax(1) == samples.labels).mean())
    logits -= logits.max(1, keepdims=True)  # keeps the exponentials finite
    log_probabilities = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    loss = -float(log_probabilities[rows, samples.labels].mean())
    if not math.isfinite(loss):
        raise TaskFailed(
            f"the loss is {loss}: training diverged; a smaller learning_rate in the plan may help"
        )
    if not gradient:
        return BatchResult(loss, accuracy, None)
    error = np.exp(log_probabilities)
    error[rows, samples.labels] -= 1.0
    error /= len(rows)
    flat = np.concatenate([(error.T @ samples.features).ravel(), error.sum(0)])
    return BatchResult(loss, accuracy, flat)


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
    results, sizes = list[BatchResult](), list[int]()
    for indices in order:
        if results and watch and watch.stops(results[-1].loss):
            break
        results.append(evaluate_batch(model, samples.of(indices), gradient=want_gradient))
        sizes.append(len(indices))
    measured = sum(sizes)
    accuracies = zip(results, sizes, strict=True)
    return ModelMeasures(
        mean_loss(measurement, [r.loss for r in results], sizes, len(samples.labels)),
        min(sum(n / measured * result.accuracy for result, n in accuracies), 1.0),
        _gradient_norm(results, sizes) if want_gradient else None,
        measured,
    )


def _gradient_norm(results: list[BatchResult], sizes: list[int]) -> float:
    """Return the norm of the mean gradient."""
    measured, total = sum(sizes), np.zeros(1, np.float32)
    for result, size in zip(results, sizes, strict=True):
        assert result.gradient is not None, "measure asked for it"
        total = total + np.float32(size / measured) * result.gradient
    return float(np.linalg.norm(total))
