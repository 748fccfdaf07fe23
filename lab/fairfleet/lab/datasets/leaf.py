"""FEMNIST, Shakespeare and Sent140 as LEAF's scripts write them: JSON files with natural users.

A file is `{"users": […], "num_samples": […], "user_data": {user: {"x": […], "y": […]}}}`. Copy the
folder `train` (and `test`, if there is one) of a dataset's `data` folder to `leaf/<name>/` in a
data folder. LEAF's own folder `data` works as a data folder, too.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fairfleet.lab.datasets.base import Array, BrokenDataset, Dataset, concatenate_parts
from fairfleet.lab.datasets.files import UNREADABLE
from fairfleet.lab.datasets.places import Form, read_first_form
from fairfleet.lab.datasets.text import WINDOW, Alphabet, padded

# LEAF's own 80 characters in LEAF's order, so that the codes are the classes of its papers.
SHAKESPEARE = Alphabet(
    "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"
)
PRINTABLE = Alphabet("".join(map(chr, range(32, 127))))
TWEET_LENGTH = 140  # characters
TWEET_TEXT = 4  # Index of the text among the fields of a tweet.
FEMNIST_CLASSES = 62
WEBSITE = "https://github.com/TalwalkarLab/leaf"

Decoder = Callable[[list[Any]], Array]  # Decodes the JSON values of one user.


class LeafFormat(NamedTuple):
    """How the samples and labels of one LEAF dataset are decoded."""

    samples: Decoder
    labels: Decoder
    classes: int


def femnist(folders: Sequence[Path]) -> Dataset:
    """Return handwritten characters of 62 classes by writer, as 28 x 28 float32.

    The background is 1.0, as in LEAF's files.
    """
    return _read("femnist", folders, LeafFormat(_decode_images, _decode_numbers, FEMNIST_CLASSES))


def shakespeare(folders: Sequence[Path]) -> Dataset:
    """Return samples of 80 characters by speaking role, each labelled with the next character."""
    return _read(
        "shakespeare", folders, LeafFormat(_decode_lines, _decode_characters, SHAKESPEARE.size)
    )


def sent140(folders: Sequence[Path]) -> Dataset:
    """Return tweets by author, labelled by mood (0 bad, 1 good).

    A sample has the codes of a tweet's last 140 characters, from an alphabet of 95.
    """
    return _read("sent140", folders, LeafFormat(_decode_tweets, _decode_numbers, 2))


def _decode_images(values: list[Any]) -> Array:
    return np.array(values, np.float32).reshape(-1, 28, 28)


def _decode_numbers(values: list[Any]) -> Array:
    return np.array([int(value) for value in values], np.int64)


def _decode_lines(values: list[Any]) -> Array:
    return padded([SHAKESPEARE.encode(line) for line in values], WINDOW, SHAKESPEARE.blank)


def _decode_characters(values: list[Any]) -> Array:
    return SHAKESPEARE.encode("".join(value[0] for value in values)).astype(np.int64)


def _decode_tweets(values: list[Any]) -> Array:
    return padded(
        [PRINTABLE.encode(fields[TWEET_TEXT]) for fields in values], TWEET_LENGTH, PRINTABLE.blank
    )


class UserSamples(NamedTuple):
    """One user's samples in one file."""

    user: str
    x: Array
    y: Array


def _read(name: str, folders: Sequence[Path], leaf_format: LeafFormat) -> Dataset:
    folder = _find_folder(name, folders)
    train, test = (
        [samples for path in paths for samples in users(path, leaf_format)]
        for paths in (sorted((folder / part).glob("*.json")) for part in ("train", "test"))
    )
    if not train:
        raise BrokenDataset(f"{folder / 'train'} has no JSON file with a user's samples")
    everyone = (*train, *test)
    codes = {user: code for code, user in enumerate(dict.fromkeys(u.user for u in everyone))}
    return Dataset(
        f"leaf-{name}",
        *concatenate_parts([(u.x, u.y) for u in train], [(u.x, u.y) for u in test]),
        leaf_format.classes,
        user=np.concatenate([np.full(len(u.y), codes[u.user]) for u in everyone]),
        user_names=tuple(codes),
    )


def _find_folder(name: str, folders: Sequence[Path]) -> Path:
    """Return the folder that contains `train` and perhaps `test`."""
    how_to_get = (
        f"run preprocess.sh of LEAF's {name} ({WEBSITE}) and copy the folders data/train and "
        "data/test that it creates"
    )
    # The second path is the one in LEAF's own folder `data`.
    paths = (f"leaf/{name}/train", f"{name}/data/train")
    forms = [Form((path,), lambda paths: paths[0].parent) for path in paths]
    return read_first_form(f"leaf-{name}", forms, folders, how_to_get)


def users(path: Path, leaf_format: LeafFormat) -> Iterator[UserSamples]:
    """Yield the users of one file, each decoded to arrays at once.

    Python lists of numbers take ten times the memory of arrays. Raises BrokenDataset if the file
    does not fit the format.
    """
    try:
        user_data = json.loads(path.read_bytes())["user_data"]
        for user, data in user_data.items():
            user.encode()  # JSON allows half of a surrogate pair, which is no valid name.
            yield UserSamples(user, leaf_format.samples(data["x"]), leaf_format.labels(data["y"]))
    except (*UNREADABLE, TypeError, AttributeError, IndexError) as error:
        raise BrokenDataset(
            f"{path} is not a LEAF file of this dataset: {type(error).__name__}: {error}"
        ) from error
