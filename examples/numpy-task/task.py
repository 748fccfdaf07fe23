"""What a client trains: a network with one hidden layer in plain numpy.

Forward and backward pass are written out, so this runs wherever numpy does. The task also reports a
measure of its own: the accuracy of the digit, or class, that it recognises worst.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fairfleet.client import higher
from fairfleet.client.task import Job, Trained
from fairfleet.client.training.batches import batches
from fairfleet.common.reports import Evaluation, TrainReport
from fairfleet.common.tensors import Arrays, Model
from fairfleet.lab.datasets import load

CLASSES, HIDDEN = 10, 32
Matrix = NDArray[Any]


class Samples(NamedTuple):
    """Features, one row per sample, and labels from 0."""

    x: Matrix
    y: NDArray[np.int64]


def task(client: str = "0", clients: str = "3", data_dir: str = "") -> NumpyTask:
    """Return the task of one client; `fairfleet client -o client=1` gives the arguments.

    The images are scikit-learn's digits, or Fashion-MNIST from a folder. Each client takes every
    third image, if there are three.
    """
    dataset = load("fashion-mnist", Path(data_dir)) if data_dir else load("digits")
    own = slice(int(client), None, int(clients))
    x = dataset.x[own].reshape(len(dataset.y[own]), -1).astype(np.float32)
    samples = Samples(x / max(x.max(), 1), dataset.y[own])
    cut = len(samples.y) * 4 // 5
    return NumpyTask(
        Samples(samples.x[:cut], samples.y[:cut]), Samples(samples.x[cut:], samples.y[cut:])
    )


class NumpyTask:
    """Stochastic gradient descent, as the server's plan says. FairFleet calls the three methods."""

    device = "cpu"

    def __init__(self, train: Samples, test: Samples) -> None:
        self._train, self._test = train, test
        self.train_samples, self.test_samples = len(train.y), len(test.y)

    def initial_model(self) -> Model:
        """Return the model before training: small random weights."""
        random = np.random.default_rng(0)
        features = self._train.x.shape[1]
        return Model.of(
            {
                "hidden.weight": random.normal(0, features**-0.5, (features, HIDDEN)),
                "hidden.bias": np.zeros(HIDDEN),
                "output.weight": random.normal(0, HIDDEN**-0.5, (HIDDEN, CLASSES)),
                "output.bias": np.zeros(CLASSES),
            }
        )

    def train(self, model: Arrays, job: Job) -> Trained:
        """Train the received model, and report its loss before."""
        trained = {name: array.copy() for name, array in model.items()}
        loss_before, gradient = loss_and_gradient(trained, self._train)
        norm = float(np.sqrt(sum((part**2).sum() for part in gradient.values())))
        planned, steps = job.plan.steps_for(self.train_samples), 0
        for steps, batch in enumerate(batches(job.plan, self.train_samples), start=1):
            samples = Samples(self._train.x[batch], self._train.y[batch])
            loss, gradient = loss_and_gradient(trained, samples)
            for name, array in trained.items():
                array -= job.plan.learning_rate * gradient[name]
            job.progress(steps, planned, loss)
            if job.enough():  # the time or the steps of this machine are used up
                break
        report = TrainReport(
            samples=self.train_samples,
            loss_before=loss_before,
            steps=steps,
            learning_rate=job.plan.learning_rate,
            gradient_norm=norm if job.want_gradient_norm else None,
        )
        return Trained(trained, report)

    def evaluate(self, model: Arrays) -> Evaluation:
        """Return loss, accuracy and the accuracy of the worst class on the test samples."""
        _, log_probabilities = forward(model, self._test.x)
        y = self._test.y
        right = log_probabilities.argmax(1) == y
        worst = min(right[y == label].mean() for label in np.unique(y))
        return Evaluation(
            samples=self.test_samples,
            loss=float(-log_probabilities[np.arange(len(y)), y].mean()),
            accuracy=float(right.mean()),
            measures={"worst_class": higher(worst)},
        )


def forward(model: Arrays, x: Matrix) -> tuple[Matrix, Matrix]:
    """Return the hidden activations, and the logarithm of each class's probability."""
    hidden = np.maximum(x @ model["hidden.weight"] + model["hidden.bias"], 0)
    logits = hidden @ model["output.weight"] + model["output.bias"]
    logits = logits - logits.max(1, keepdims=True)  # keeps the exponentials finite
    return hidden, logits - np.log(np.exp(logits).sum(1, keepdims=True))


def loss_and_gradient(model: Arrays, samples: Samples) -> tuple[float, Arrays]:
    """Return the mean cross entropy, and its gradient by each tensor of the model."""
    hidden, log_probabilities = forward(model, samples.x)
    rows = np.arange(len(samples.y))
    at_output = np.exp(log_probabilities)
    at_output[rows, samples.y] -= 1
    at_output /= len(samples.y)
    at_hidden = (at_output @ model["output.weight"].T) * (hidden > 0)
    gradient = {
        "hidden.weight": samples.x.T @ at_hidden,
        "hidden.bias": at_hidden.sum(0),
        "output.weight": hidden.T @ at_output,
        "output.bias": at_output.sum(0),
    }
    return float(-log_probabilities[rows, samples.y].mean()), gradient
