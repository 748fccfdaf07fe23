"""The data of an experiment: load a dataset and divide it among the clients.

Partition and split depend only on the experiment and its seed. Two runs of one experiment
therefore give every client the same samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import numpy as np

from fairfleet.common.errors import UsageError
from fairfleet.lab.datasets.base import Dataset
from fairfleet.lab.datasets.client_data import ClientData
from fairfleet.lab.datasets.preprocessing import Preprocessing
from fairfleet.lab.datasets.registry import load
from fairfleet.lab.experiments.experiment import Experiment
from fairfleet.lab.label_noise import with_label_noise
from fairfleet.lab.partitioning.partitions import Indices, partition
from fairfleet.lab.partitioning.splits import Split, split_all, split_as_published

DEFAULT_SPLIT = (0.8, 0.2)  # train, test


@lru_cache(maxsize=2)
def load_cached(name: str, data_dir: Path | None, state: str) -> Dataset:
    """Load a dataset once per sweep, and again when `state` says that its files have changed."""
    return load(name, data_dir)


def select_samples(experiment: Experiment, loaded: Dataset) -> Dataset:
    """Return the part and the classes of a loaded dataset that the experiment uses."""
    dataset = loaded.training_part() if experiment.part == "train" else loaded
    return dataset.only_classes(experiment.classes) if experiment.classes else dataset


def client_datasets(
    experiment: Experiment, dataset: Dataset, convert: Preprocessing
) -> list[ClientData]:
    """Return the samples of every client, converted for a model."""
    seed = experiment.seed if experiment.data_seed is None else experiment.data_seed
    parts = partition(experiment.partition, dataset.y, dataset.user, experiment.clients, seed)
    splits = [
        _reduce_training(split, experiment.train_share, (seed, client))
        for client, split in enumerate(_split(experiment, dataset, parts, seed))
    ]
    names = _client_names(experiment, dataset, parts)
    x, y = dataset.x, dataset.y
    clients = [
        ClientData(
            name,
            convert(x[split.train]),
            y[split.train],
            convert(x[split.test]),
            y[split.test],
        )
        for name, split in zip(names, splits, strict=True)
    ]
    return _with_noise(experiment, clients, dataset.classes, seed)


def _with_noise(
    experiment: Experiment, clients: list[ClientData], classes: int, seed: int
) -> list[ClientData]:
    """Add the label noise of the experiment, and keep the right labels to measure it."""
    if experiment.label_noise is None:
        return clients
    right = [client.train_y for client in clients]
    noisy = with_label_noise(right, classes, experiment.label_noise, seed)
    return [
        replace(client, train_y=labels, true_y=client.train_y)
        for client, labels in zip(clients, noisy, strict=True)
    ]


def _split(
    experiment: Experiment, dataset: Dataset, parts: Sequence[Indices], seed: int
) -> list[Split]:
    """Split each client's samples into train and test.

    By default only natural clients use the published split. Other partitions may divide a class in
    the order of the file, and then only a few clients would receive its test samples.
    """
    has_test_part = dataset.train_size < len(dataset)
    is_natural = experiment.partition.startswith("user")
    shares = experiment.split or ("published" if has_test_part and is_natural else DEFAULT_SPLIT)
    if shares != "published":
        return split_all(parts, shares, seed)
    if not has_test_part:
        raise UsageError(
            f"{dataset.name} has no published test part here; give a split, such as [0.8, 0.2]"
        )
    return split_as_published(parts, dataset.train_size)


def _reduce_training(split: Split, share: float, seed: tuple[int, int]) -> Split:
    """Keep a random share of the training samples, at least one."""
    if share == 1.0:
        return split
    shuffled = np.random.default_rng(seed).permutation(split.train)
    return split._replace(train=shuffled[: max(1, round(share * len(shuffled)))])


def _client_names(experiment: Experiment, dataset: Dataset, parts: Sequence[Indices]) -> list[str]:
    if experiment.partition.startswith("user") and dataset.user is not None and dataset.user_names:
        return [dataset.user_names[dataset.user[indices[0]]] for indices in parts]
    width = len(str(len(parts) - 1))
    return [f"client-{number:0{width}d}" for number in range(len(parts))]
