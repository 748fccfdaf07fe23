"""Datasets by name: `load("cifar10")`, `load("cifar100,labels=coarse")`, or the path of one's own data."""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fairfleet.common.errors import UsageError
from fairfleet.lab.datasets import adult, cifar, embedded, leaf, mnist, shakespeare, synthetic, vehicle
from fairfleet.lab.datasets.base import Dataset
from fairfleet.lab.datasets.own import own, sources
from fairfleet.lab.datasets.places import data_folders

# A loader whose first parameter is `folders` reads files; the other parameters of each are its options.
LOADERS: dict[str, Callable[..., Dataset]] = {
    "adult": adult.adult,
    "cifar10": cifar.cifar10,
    "cifar100": cifar.cifar100,
    "digits": embedded.digits,
    "digits-rotated": embedded.digits_rotated,
    "fashion-mnist": mnist.fashion_mnist,
    "leaf-femnist": leaf.femnist,
    "leaf-sent140": leaf.sent140,
    "leaf-shakespeare": leaf.shakespeare,
    "mnist": mnist.mnist,
    "shakespeare": shakespeare.shakespeare,
    "synthetic": synthetic.synthetic,
    "vehicle": vehicle.vehicle,
}
READS = {"int": int, "float": float, "str": str}


def load(name: str, data_dir: Path | None = None, **options: Any) -> Dataset:
    """The dataset of this name; options may be given here or in the name, as in "synthetic,alpha=0.5"."""
    kind, *given = name.split(",")
    if kind not in LOADERS:
        return _own(name)
    loader, chosen = LOADERS[kind], {**dict(_parsed(kind, option) for option in given), **options}
    takes = inspect.signature(loader).parameters
    if unknown := sorted(chosen.keys() - (takes.keys() - {"folders"})):
        others = ", ".join(takes.keys() - {"folders"}) or "none"
        raise UsageError(f"the dataset {kind} has no option {', '.join(unknown)}; its options: {others}")
    typed = {option: _typed(kind, option, value, takes[option].annotation) for option, value in chosen.items()}
    return loader(data_folders(data_dir), **typed) if "folders" in takes else loader(**typed)


def state_of_own(name: str) -> str:
    """Tells whether one's own data are still what they were: sizes and times of the files. Empty for known datasets."""
    if name.split(",")[0] in LOADERS or not Path(name).exists():
        return ""
    told = [[str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns] for file in sources(Path(name))]
    return hashlib.sha256(json.dumps(told).encode()).hexdigest()


def _own(path: str) -> Dataset:
    if not Path(path).exists():
        known = ", ".join(sorted(LOADERS))
        raise UsageError(f"there is no dataset and no file {path!r}; there are {known}, and the path of your own data")
    return own(Path(path))


def _parsed(name: str, text: str) -> tuple[str, str]:
    option, equals, value = text.partition("=")
    if not equals:
        raise UsageError(f"the dataset {name} was given {text!r}; an option looks like name=value")
    return option.strip(), value.strip()


def _typed(name: str, option: str, value: Any, kind: str) -> Any:
    try:
        return READS[kind](value)
    except ValueError:
        raise UsageError(f"the dataset {name} was given {option}={value}; expected {kind}") from None
