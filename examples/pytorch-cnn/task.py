"""What a client trains: a small convolutional network in PyTorch, on its own part of the images.

The images are scikit-learn's digits (8 by 8 pixels), or Fashion-MNIST (28 by 28 pixels) from a
folder. The network takes both sizes. Clients have different shares of the classes, as real ones do.
"""

from __future__ import annotations

from pathlib import Path

from torch import nn

from fairfleet.client.torch import TorchTask
from fairfleet.lab.datasets import load
from fairfleet.lab.datasets.preprocessing import preprocessing
from fairfleet.lab.partitioning import partition, split

CLASSES = 10


def model() -> nn.Module:
    """Return the untrained network."""
    return nn.Sequential(
        nn.Conv2d(1, 16, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(4),  # so that the size of the images does not matter
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, CLASSES),
    )


def task(client: str = "0", clients: str = "3", data_dir: str = "") -> TorchTask:
    """Return the task of one client; `fairfleet client -o client=1` gives the arguments.

    All clients divide the same images with the same seed, so that no image has two clients. A
    device would read its own images here instead.
    """
    dataset = load("fashion-mnist", Path(data_dir)) if data_dir else load("digits")
    parts = partition("dirichlet:1", dataset.y, clients=int(clients), seed=0)
    own = split(parts[int(client)], (0.8, 0.2))
    convert = preprocessing("unit", dataset)  # values from 0 to 1
    x, y = convert(dataset.x[own.train]), dataset.y[own.train]
    test_x, test_y = convert(dataset.x[own.test]), dataset.y[own.test]
    return TorchTask(
        model,
        train=(x.reshape(len(x), 1, *x.shape[-2:]), y),
        test=(test_x.reshape(len(test_x), 1, *test_x.shape[-2:]), test_y),
        loss=nn.functional.cross_entropy,
    )
