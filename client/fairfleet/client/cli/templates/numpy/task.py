"""What a client trains: softmax regression in plain numpy, on its own part of the data.

`NumpyTask` has the three methods that FairFleet calls. Change the model, the loss and the data; any
library will do. Arrays come and go by name.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fairfleet.client.task import Job, Trained
from fairfleet.client.training.batches import batches
from fairfleet.common.reports import Evaluation, TrainReport
from fairfleet.common.tensors import Arrays, Model

CLASSES = 10
Matrix = NDArray[np.float64]
Labels = NDArray[np.int64]


def task(client: str = "0", clients: str = "3", data_dir: str = "") -> NumpyTask:
    """Return the task of one client; `fairfleet client -o client=1` gives the arguments."""
    x, y = load_data(int(client), int(clients), data_dir)
    cut = len(y) * 4 // 5
    return NumpyTask((x[:cut], y[:cut]), (x[cut:], y[cut:]))


def load_data(client: int, clients: int, data_dir: str) -> tuple[Matrix, Labels]:
    """Return the samples of one client: one row of numbers each, and a label from 0 to 9.

    Without a folder they are a part of scikit-learn's digits. A folder has the files
    client-0.npz, client-1.npz and so on, each with the arrays x and y.
    """
    if data_dir:
        file = Path(data_dir) / f"client-{client}.npz"
        with np.load(file, allow_pickle=False) as arrays:
            return arrays["x"].reshape(len(arrays["x"]), -1), arrays["y"]
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    return x[client::clients] / 16, y[client::clients]


class NumpyTask:
    """Softmax regression by stochastic gradient descent."""

    device = "cpu"

    def __init__(self, train: tuple[Matrix, Labels], test: tuple[Matrix, Labels]) -> None:
        self._train, self._test = train, test
        self.train_samples, self.test_samples = len(train[1]), len(test[1])

    def initial_model(self) -> Model:
        """Return the model before training. All clients must have the same tensors."""
        features = self._train[0].shape[1]
        return Model.of({"weight": np.zeros((features, CLASSES)), "bias": np.zeros(CLASSES)})

    def train(self, model: Arrays, job: Job) -> Trained:
        """Train the received model as the server's plan says."""
        x, y = self._train
        weight, bias = model["weight"].astype(float), model["bias"].astype(float)
        loss_before, *gradient = loss_and_gradient(weight, bias, x, y)
        norm = float(np.sqrt(sum((part**2).sum() for part in gradient)))
        planned, steps = job.plan.steps_for(len(y)), 0
        for steps, batch in enumerate(batches(job.plan, len(y)), start=1):
            loss, by_weight, by_bias = loss_and_gradient(weight, bias, x[batch], y[batch])
            weight -= job.plan.learning_rate * by_weight
            bias -= job.plan.learning_rate * by_bias
            job.progress(steps, planned, loss)
            if job.enough():  # the time or the steps of this machine are used up
                break
        report = TrainReport(
            samples=len(y),
            loss_before=loss_before,
            steps=steps,
            learning_rate=job.plan.learning_rate,
            gradient_norm=norm if job.want_gradient_norm else None,
        )
        return Trained({"weight": weight, "bias": bias}, report)

    def evaluate(self, model: Arrays) -> Evaluation:
        """Return loss and accuracy on this client's test samples."""
        x, y = self._test
        loss, _, _ = loss_and_gradient(model["weight"], model["bias"], x, y)
        right = (x @ model["weight"] + model["bias"]).argmax(1) == y
        return Evaluation(samples=len(y), loss=loss, accuracy=float(right.mean()))


def loss_and_gradient(
    weight: Matrix, bias: Matrix, x: Matrix, y: Labels
) -> tuple[float, Matrix, Matrix]:
    """Return the mean cross entropy of some samples, and its gradient by weight and bias."""
    logits = x @ weight + bias
    logits -= logits.max(1, keepdims=True)  # keeps the exponentials finite
    probabilities = np.exp(logits)
    probabilities /= probabilities.sum(1, keepdims=True)
    rows = np.arange(len(y))
    loss = float(-np.log(probabilities[rows, y]).mean())
    probabilities[rows, y] -= 1
    return loss, x.T @ probabilities / len(y), probabilities.mean(0)
