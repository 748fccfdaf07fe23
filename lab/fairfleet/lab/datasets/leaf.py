"""FEMNIST, Shakespeare and Sent140 as LEAF's scripts write them: folders of JSON files with natural users.

A file is `{"users": […], "num_samples": […], "user_data": {user: {"x": […], "y": […]}}}`. The folder `train` (and
`test`, if there is one) of each dataset's `data` folder goes to `leaf/<name>/` in a data folder; LEAF's own folder
`data` can be a data folder, too.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fairfleet.lab.datasets.base import Array, BrokenDataset, Dataset, pooled
from fairfleet.lab.datasets.files import UNREADABLE
from fairfleet.lab.datasets.places import Form, find
from fairfleet.lab.datasets.text import WINDOW, Alphabet, padded

# LEAF's own 80 characters, in its order: its codes are the classes of its papers.
SHAKESPEARE = Alphabet("\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}")
PRINTABLE = Alphabet("".join(map(chr, range(32, 127))))
TWEET = 140  # characters
TWEET_TEXT = 4  # the place of the text among a tweet's fields
FEMNIST_CLASSES = 62
HOME = "https://github.com/TalwalkarLab/leaf"

Samples = Callable[[list[Any]], Array]


class Kind(NamedTuple):
    samples: Samples  # of one user
    labels: Samples
    classes: int


def femnist(folders: Sequence[Path]) -> Dataset:
    """Handwritten characters of 62 classes, 28 x 28, by writer; paper is 1.0, as LEAF has it."""
    return _read("femnist", folders, Kind(_pictures, _numbers, FEMNIST_CLASSES))


def shakespeare(folders: Sequence[Path]) -> Dataset:
    return _read("shakespeare", folders, Kind(_lines, _characters, SHAKESPEARE.size))


def sent140(folders: Sequence[Path]) -> Dataset:
    """Tweets as the codes of their last 140 characters (95 in all), by author; is the mood good or bad?"""
    return _read("sent140", folders, Kind(_tweets, _numbers, 2))


def _pictures(values: list[Any]) -> Array:
    return np.array(values, np.float32).reshape(-1, 28, 28)


def _numbers(values: list[Any]) -> Array:
    return np.array([int(value) for value in values], np.int64)


def _lines(values: list[Any]) -> Array:
    return padded([SHAKESPEARE.encode(line) for line in values], WINDOW, SHAKESPEARE.blank)


def _characters(values: list[Any]) -> Array:
    return SHAKESPEARE.encode("".join(value[0] for value in values)).astype(np.int64)


def _tweets(values: list[Any]) -> Array:
    return padded([PRINTABLE.encode(fields[TWEET_TEXT]) for fields in values], TWEET, PRINTABLE.blank)


class Held(NamedTuple):
    """One user's samples in one file."""

    user: str
    x: Array
    y: Array


def _read(name: str, folders: Sequence[Path], kind: Kind) -> Dataset:
    how = f"run preprocess.sh of LEAF's {name} ({HOME}) and copy the folders data/train and data/test that it makes"
    places = (f"leaf/{name}/train", f"{name}/data/train")  # the second is that of LEAF's own folder `data`
    forms = [Form((place,), lambda paths: paths[0].parent) for place in places]
    folder = find(f"leaf-{name}", forms, folders, how)
    train, test = ([held for path in sorted((folder / part).glob("*.json")) for held in users(path, kind)]
                   for part in ("train", "test"))  # fmt: skip
    if not train:
        raise BrokenDataset(f"{folder / 'train'} has no JSON file with a user's samples")
    codes = {user: code for code, user in enumerate(dict.fromkeys(held.user for held in (*train, *test)))}
    return Dataset(
        f"leaf-{name}",
        *pooled([held[1:] for held in train], [held[1:] for held in test]),
        kind.classes,
        user=np.concatenate([np.full(len(held.y), codes[held.user]) for held in (*train, *test)]),
        user_names=tuple(codes),
    )


def users(path: Path, kind: Kind) -> Iterator[Held]:
    """A file at a time, each user as arrays at once: numbers in Python's own lists take ten times the memory."""
    try:
        held = json.loads(path.read_bytes())["user_data"]
        for user, data in held.items():
            user.encode()  # half a character, which JSON can hold, is no name
            yield Held(user, kind.samples(data["x"]), kind.labels(data["y"]))
    except (*UNREADABLE, TypeError, AttributeError, IndexError) as error:
        raise BrokenDataset(f"{path} is no file of LEAF's for this dataset: {type(error).__name__}: {error}") from error
