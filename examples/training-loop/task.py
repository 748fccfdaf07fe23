"""What a client trains: a network with a training loop of its own.

The loop has what `TorchTask` has not: the solver AdamW, a learning rate that falls by a cosine,
noise on the images, and a limit for the gradient. It reads from the server's plan what it wants to
share with other clients: the number of steps, the batches and the first learning rate.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from fairfleet.client.task import Job, Trained
from fairfleet.client.training.batches import batches
from fairfleet.common.reports import Evaluation, TrainReport
from fairfleet.common.tensors import Arrays, Model
from fairfleet.lab.datasets import load
from fairfleet.lab.datasets.preprocessing import preprocessing

CLASSES = 10
NOISE = 0.05  # standard deviation, of values from 0 to 1
LARGEST_GRADIENT = 1.0
Samples = tuple[Tensor, Tensor]


def task(client: str = "0", clients: str = "3", data_dir: str = "") -> LoopTask:
    """Return the task of one client; `fairfleet client -o client=1` gives the arguments.

    The images are scikit-learn's digits, or Fashion-MNIST from a folder. Each client takes every
    third image, if there are three.
    """
    dataset = load("fashion-mnist", Path(data_dir)) if data_dir else load("digits")
    own = slice(int(client), None, int(clients))
    x = torch.from_numpy(preprocessing("unit", dataset)(dataset.x[own])).flatten(1)
    y = torch.from_numpy(dataset.y[own])
    cut = len(y) * 4 // 5
    return LoopTask((x[:cut], y[:cut]), (x[cut:], y[cut:]))


class LoopTask:
    """Trains in a loop of its own; FairFleet calls the three methods."""

    device = "cpu"

    def __init__(self, train: Samples, test: Samples) -> None:
        self._train, self._test = train, test
        self.train_samples, self.test_samples = len(train[1]), len(test[1])
        features = train[0].shape[1]
        self._network = nn.Sequential(nn.Linear(features, 64), nn.ReLU(), nn.Linear(64, CLASSES))

    def initial_model(self) -> Model:
        """Return the model before training. All clients must have the same tensors."""
        return Model.of(self._arrays())

    def train(self, model: Arrays, job: Job) -> Trained:
        """Train the received model for as many steps as the plan says."""
        self._load(model)
        loss_before = self._measure(self._train)[0]
        planned, steps = job.plan.steps_for(self.train_samples), 0
        solver = torch.optim.AdamW(self._network.parameters(), lr=job.plan.learning_rate)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(solver, planned)
        noise = torch.Generator().manual_seed(job.plan.seed % 2**63)
        for steps, batch in enumerate(batches(job.plan, self.train_samples), start=1):
            x, y = (part[torch.from_numpy(batch)] for part in self._train)
            x = x + NOISE * torch.randn(x.shape, generator=noise)
            solver.zero_grad()
            loss = nn.functional.cross_entropy(self._network(x), y)
            loss.backward()
            nn.utils.clip_grad_norm_(self._network.parameters(), LARGEST_GRADIENT)
            solver.step()
            schedule.step()
            job.progress(steps, planned, loss.item())  # the server sees how far this client is
            if job.enough():  # the time or the steps of this machine are used up
                break
        report = TrainReport(
            samples=self.train_samples,
            loss_before=loss_before,
            steps=steps,
            learning_rate=job.plan.learning_rate,
        )
        return Trained(self._arrays(), report)

    def evaluate(self, model: Arrays) -> Evaluation:
        """Return loss and accuracy on this client's test samples."""
        self._load(model)
        loss, accuracy = self._measure(self._test)
        return Evaluation(samples=self.test_samples, loss=loss, accuracy=accuracy)

    def _load(self, model: Arrays) -> None:
        # The arrays are views that may not be written to, so they are copied.
        self._network.load_state_dict(
            {name: torch.from_numpy(array.copy()) for name, array in model.items()}
        )

    def _arrays(self) -> Arrays:
        return {name: value.numpy().copy() for name, value in self._network.state_dict().items()}

    def _measure(self, samples: Samples) -> tuple[float, float]:
        """Return mean loss and accuracy."""
        x, y = samples
        with torch.no_grad():
            output = self._network(x)
            loss = nn.functional.cross_entropy(output, y)
        return loss.item(), (output.argmax(1) == y).double().mean().item()
