"""Divide a dataset among clients in one's own way, and write a file for each client.

Each client gets two favourite classes: most of its images are of these two. So the clients differ,
as real ones do. Nothing here needs FairFleet, except the digits that stand for your own data.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fairfleet.lab.datasets import load

FAVOURITE_SHARE = 0.8  # of a client's images, as far as there are enough
Indices = NDArray[np.intp]


def divide(labels: NDArray[np.int64], clients: int, seed: int = 0) -> list[Indices]:
    """Return the indices of each client's samples; every sample has one client.

    A sample goes to a client that favours its class, or with the rest of the probability to any.
    """
    random = np.random.default_rng(seed)
    classes = int(labels.max()) + 1
    favours = np.zeros((clients, classes), bool)
    for client in range(clients):
        favours[client, [2 * client % classes, (2 * client + 1) % classes]] = True
    owners = random.integers(0, clients, len(labels))
    for index, label in enumerate(labels):
        admirers = np.flatnonzero(favours[:, label])
        if len(admirers) and random.random() < FAVOURITE_SHARE:
            owners[index] = random.choice(admirers)
    return [np.flatnonzero(owners == client) for client in range(clients)]


def write(folder: Path, x: NDArray[Any], y: NDArray[np.int64], clients: int) -> None:
    """Write client-0.npz and so on for the clients, and all.npz for the lab."""
    folder.mkdir(parents=True, exist_ok=True)
    user = np.zeros(len(y), np.int64)
    for client, indices in enumerate(divide(y, clients)):
        np.savez_compressed(folder / f"client-{client}.npz", x=x[indices], y=y[indices])
        user[indices] = client
        counts = np.bincount(y[indices], minlength=int(y.max()) + 1)
        print(f"client-{client}: {len(indices):5} samples, by class {' '.join(map(str, counts))}")
    np.savez_compressed(folder / "all.npz", x=x, y=y, user=user)


def main() -> None:
    """Read the command line, load the data, and divide them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=5)
    parser.add_argument("--output", type=Path, default=Path("data"))
    parser.add_argument("--data-dir", type=Path, help="folder with Fashion-MNIST (see README.md)")
    arguments = parser.parse_args()
    data_dir = arguments.data_dir
    dataset = load("fashion-mnist", data_dir) if data_dir else load("digits")
    write(arguments.output, dataset.x, dataset.y, arguments.clients)


if __name__ == "__main__":
    main()
