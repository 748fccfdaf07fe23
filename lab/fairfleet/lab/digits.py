"""The embedded default: scikit-learn's digits over ten clients, two of which hold their images turned.

Eight upright clients have Dirichlet label shares; the two rotated ones are a minority that plain
averaging serves badly. scikit-learn is imported only where the images are read: a client given the
folder that `write_shards` filled starts without it, and without torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from fairfleet.client.softmax import SoftmaxTask
from fairfleet.client.task import Task
from fairfleet.common.errors import UsageError

UPRIGHT, ROTATED = 8, 2
ROTATED_SAMPLES = 100  # of each rotated client
TRAIN_SHARE = 0.7
CLASSES = 10
# A split near the average one: over seeds 0 to 23, FedAvg by samples ends at 81.5 to 87.1 % (mean of the clients,
# 83.7 on average) and 23 to 53 % (worst client, 39.4 on average); with this seed at about 83 % and 37 %.
SEED = 4
CLIENTS = tuple(f"upright-{n}" for n in range(UPRIGHT)) + tuple(f"rotated-{n}" for n in range(ROTATED))
SPLITS = 10  # a fleet of more than ten takes further splits of the same images, whose clients are called upright-0.1 …

Pixels = NDArray[np.float32]
Labels = NDArray[np.int64]


class Shard(NamedTuple):
    """One client's own data: images of 8 by 8 pixels between 0 and 1, and which digit each shows."""

    train_images: Pixels
    train_labels: Labels
    test_images: Pixels
    test_labels: Labels


def images() -> tuple[Pixels, Labels]:
    from sklearn.datasets import load_digits  # over a second of CPU: not on every client's start

    digits = load_digits()
    return (digits.images / 16.0).astype(np.float32), digits.target.astype(np.int64)


def partition(pixels: Pixels, labels: Labels, seed: int = SEED) -> dict[str, Shard]:
    """Every image to exactly one client; the same seed gives the same shards."""
    random = np.random.default_rng(seed)
    order = random.permutation(len(labels))
    minority, majority = np.split(order, [ROTATED * ROTATED_SAMPLES])
    shares = dict(zip(CLIENTS, [*_by_label(majority, labels, random), *np.split(minority, ROTATED)], strict=True))
    return {name: _shard(pixels, labels, share, random, name) for name, share in shares.items()}


def _by_label(indices: NDArray[Any], labels: Labels, random: np.random.Generator) -> list[NDArray[Any]]:
    """Splits the images of each digit among the upright clients by a Dirichlet(1.0) draw of its own."""
    held: list[list[NDArray[Any]]] = [[] for _ in range(UPRIGHT)]
    for digit in range(CLASSES):
        of_digit = indices[labels[indices] == digit]
        shares = random.dirichlet(np.ones(UPRIGHT))
        cuts = np.rint(np.cumsum(shares)[:-1] * len(of_digit)).astype(int)
        for mine, part in zip(held, np.split(of_digit, cuts), strict=True):
            mine.append(part)
    return [np.concatenate(mine) for mine in held]


def _shard(pixels: Pixels, labels: Labels, share: NDArray[Any], random: np.random.Generator, name: str) -> Shard:
    train, test = np.split(random.permutation(share), [round(TRAIN_SHARE * len(share))])
    held = np.rot90(pixels, axes=(1, 2)) if name.startswith("rotated") else pixels
    return Shard(held[train], labels[train], held[test], labels[test])


def write_shards(folder: Path, seed: int = SEED, splits: int = 1) -> None:
    """Writes each client's shard to `<folder>/<client>.npz`, for the `data` option of the tasks below."""
    folder.mkdir(parents=True, exist_ok=True)
    pixels, labels = images()
    for split in range(splits):
        for name, shard in partition(pixels, labels, seed + split).items():
            np.savez_compressed(folder / f"{_in_split(name, split)}.npz", **shard._asdict())


def read_shard(folder: Path, name: str) -> Shard:
    path = folder / f"{name}.npz"
    try:
        with np.load(path, allow_pickle=False) as file:
            return Shard(**file)
    except (OSError, EOFError, ValueError, TypeError, BadZipFile) as error:
        raise UsageError(
            f"cannot read the digits of client {name} from {path}: {error}. The option data=… names a folder "
            "that fairfleet.lab.digits.write_shards filled; without it the task makes the shard by itself."
        ) from error


def client_name(shard: str) -> str:
    """Which client `shard` means: a name such as rotated-1, or its place in the fleet, from 0."""
    names = [_in_split(name, split) for split in range(SPLITS) for name in CLIENTS]
    by_place = {str(place): name for place, name in enumerate(names)}
    if shard in names or shard in by_place:
        return by_place.get(shard, shard)
    raise UsageError(
        f"shard={shard!r} is none of the digits clients; "
        f"give a number from 0 to {len(names) - 1} or one of {', '.join(CLIENTS)}"
    )


def _in_split(name: str, split: int) -> str:
    return f"{name}.{split}" if split else name


def _shard_for(shard: str, data: str | None) -> Shard:
    name = client_name(shard)
    if data:
        return read_shard(Path(data), name)
    client, _, split = name.partition(".")
    return partition(*images(), SEED + int(split or 0))[client]


def softmax(shard: str, data: str | None = None) -> Task:
    """`--task fairfleet.lab.digits:softmax --option shard=3`: softmax regression in numpy."""
    own = _shard_for(shard, data)
    return SoftmaxTask((own.train_images, own.train_labels), test=(own.test_images, own.test_labels), classes=CLASSES)


def torch_softmax(shard: str, data: str | None = None) -> Task:
    """`softmax` in torch: the same tensors, so that clients with a GPU and clients without torch train one model."""
    from collections import OrderedDict

    from torch import nn

    from fairfleet.client.torch import TorchTask

    own = _shard_for(shard, data)
    return TorchTask(
        lambda: nn.Sequential(OrderedDict(flatten=nn.Flatten(), linear=nn.Linear(64, CLASSES))),
        train=(own.train_images, own.train_labels),
        test=(own.test_images, own.test_labels),
        loss=nn.functional.cross_entropy,
    )


def torch_mlp(shard: str, data: str | None = None) -> Task:
    """`--task fairfleet.lab.digits:torch_mlp --option shard=3`: one hidden layer, in torch."""
    import torch
    from torch import nn

    from fairfleet.client.torch import TorchTask

    # ten clients on one machine: the threads of so small a model wait for each other, 35 to 90 times slower
    torch.set_num_threads(1)
    own = _shard_for(shard, data)
    return TorchTask(
        lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, CLASSES)),
        train=(own.train_images, own.train_labels),
        test=(own.test_images, own.test_labels),
        loss=nn.functional.cross_entropy,
    )
