"""Datasets by name: `load("cifar10")`, `load("cifar100,labels=coarse")`, or a path to own data.

A name may carry options of its loader; they are checked against the loader's parameters and
converted to the annotated type, so that a misspelt option is an error and not ignored.
"""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fairfleet.common.errors import UsageError
from fairfleet.lab.datasets import (
    adult,
    cifar,
    embedded,
    leaf,
    leaf_synthetic,
    mnist,
    shakespeare,
    synthetic,
    vehicle,
)
from fairfleet.lab.datasets.base import Dataset
from fairfleet.lab.datasets.own import load_own, sources
from fairfleet.lab.datasets.places import data_folders

# A loader whose first parameter is `folders` reads files. All other parameters are its options.
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
    "leaf-synthetic": leaf_synthetic.leaf_synthetic,
    "mnist": mnist.mnist,
    "shakespeare": shakespeare.shakespeare,
    "synthetic": synthetic.synthetic,
    "vehicle": vehicle.vehicle,
}
# Dataset -> what its name meant before, oldest first; see `experiments.revisions`.
EARLIER_READINGS: dict[str, tuple[str, ...]] = {}
OPTION_TYPES = {"int": int, "float": float, "str": str}


def load(name: str, data_dir: Path | None = None, **options: Any) -> Dataset:
    """Return the dataset of this name.

    Options may be given as arguments or in the name, as in "synthetic,alpha=0.5". A name that is
    not in LOADERS is the path of the user's own data. Raises UsageError for an unknown name or
    option, and its subclasses MissingDataset and BrokenDataset for files that are not usable.
    """
    kind, *option_texts = name.split(",")
    if kind not in LOADERS:
        return _load_path(name)
    loader = LOADERS[kind]
    values = {**dict(_parse_option(kind, text) for text in option_texts), **options}
    parameters = inspect.signature(loader).parameters
    if unknown := sorted(values.keys() - (parameters.keys() - {"folders"})):
        allowed = ", ".join(parameters.keys() - {"folders"}) or "none"
        raise UsageError(
            f"the dataset {kind} has no option {', '.join(unknown)}; its options: {allowed}"
        )
    typed = {
        option: _convert_option(kind, option, value, parameters[option].annotation)
        for option, value in values.items()
    }
    return loader(data_folders(data_dir), **typed) if "folders" in parameters else loader(**typed)


def state_of_own(name: str) -> str:
    """Return a digest of the paths, sizes and times of the user's own data files.

    A changed digest means that the data may have changed. The digest of a dataset in LOADERS, or
    of a path that does not exist, is empty.
    """
    if name.split(",")[0] in LOADERS or not Path(name).exists():
        return ""
    file_states = [
        [str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns]
        for file in sources(Path(name))
    ]
    return hashlib.sha256(json.dumps(file_states).encode()).hexdigest()


def _load_path(path: str) -> Dataset:
    if not Path(path).exists():
        names = ", ".join(sorted(LOADERS))
        raise UsageError(
            f"there is no dataset and no file {path!r}; there are {names}, "
            "and the path of your own data"
        )
    return load_own(Path(path))


def _parse_option(name: str, text: str) -> tuple[str, str]:
    option, equals, value = text.partition("=")
    if not equals:
        raise UsageError(f"the dataset {name} was given {text!r}; an option looks like name=value")
    return option.strip(), value.strip()


def _convert_option(name: str, option: str, value: Any, type_name: str) -> Any:
    try:
        return OPTION_TYPES[type_name](value)
    except ValueError:
        raise UsageError(
            f"the dataset {name} was given {option}={value}; expected {type_name}"
        ) from None
