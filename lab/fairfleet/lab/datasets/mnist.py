"""MNIST and Fashion-MNIST: the published IDX files, gzipped or not, or npz files.

The published training part comes first; decoded arrays are cached.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from fairfleet.lab.datasets.base import BrokenDataset, Dataset, Parts, concatenate_parts
from fairfleet.lab.datasets.cache import load_cached
from fairfleet.lab.datasets.files import read_idx, read_pair
from fairfleet.lab.datasets.places import Form, read_first_form

IDX_FILES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)
FASHION_CLASSES = (
    "T-shirt", "Trouser", "Pullover", "Dress", "Coat",
    "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot",
)  # fmt: skip


def mnist(folders: Sequence[Path]) -> Dataset:
    """Return MNIST: 70,000 grey images of 28 x 28 bytes, 10 classes."""
    how_to_get = "download the four .gz files from https://yann.lecun.com/exdb/mnist/"
    return _read("mnist", ("mnist", "MNIST/raw"), folders, how_to_get, tuple("0123456789"))


def fashion_mnist(folders: Sequence[Path]) -> Dataset:
    """Return Fashion-MNIST: 70,000 grey images of 28 x 28 bytes, 10 classes."""
    how_to_get = (
        "on Debian and Ubuntu, apt install dataset-fashion-mnist; elsewhere download the four .gz "
        "files that https://github.com/zalandoresearch/fashion-mnist lists"
    )
    names = ("fashion-mnist", "fashion_mnist", "FashionMNIST/raw")
    return _read("fashion-mnist", names, folders, how_to_get, FASHION_CLASSES)


def _read(
    name: str,
    subfolders: Sequence[str],
    folders: Sequence[Path],
    how_to_get: str,
    classes: tuple[str, ...],
) -> Dataset:
    npz, idx = partial(_read_npz, name), partial(_read_idx, name)
    forms = [
        form
        for folder in subfolders
        for form in (
            Form((f"{folder}/train.npz", f"{folder}/test.npz"), npz),
            Form(tuple(f"{folder}/{file}.gz" for file in IDX_FILES), idx),
            Form(tuple(f"{folder}/{file}" for file in IDX_FILES), idx),
        )
    ]
    parts = read_first_form(name, forms, folders, how_to_get)
    if parts.x.shape[1:] != (28, 28):
        raise BrokenDataset(f"{name} has images of {parts.x.shape[1:]}, expected 28 x 28")
    return Dataset(name, *parts, len(classes), class_names=classes)


def _read_npz(name: str, paths: Sequence[Path]) -> Parts:
    return load_cached(
        name, paths, lambda: concatenate_parts([read_pair(paths[0])], [read_pair(paths[1])])
    )


def _read_idx(name: str, paths: Sequence[Path]) -> Parts:
    return load_cached(name, paths, lambda: _decode_idx(paths))


def _decode_idx(paths: Sequence[Path]) -> Parts:
    train_x, train_y, test_x, test_y = (read_idx(path) for path in paths)
    return concatenate_parts([(train_x, train_y)], [(test_x, test_y)])
