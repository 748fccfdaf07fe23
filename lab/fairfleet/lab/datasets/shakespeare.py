"""Shakespeare by role: each speaking role is a client, each sample predicts the next character.

The lines of the roles (public-domain text) come from `roles.json.gz`. The module `leaf` reads
LEAF's own files.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fairfleet.common.errors import UsageError
from fairfleet.lab.datasets.base import BrokenDataset, Dataset
from fairfleet.lab.datasets.files import UNREADABLE, open_plain
from fairfleet.lab.datasets.places import Form, read_first_form
from fairfleet.lab.datasets.text import WINDOW, Alphabet, windows

# Every character of the text except the end of a line, which counts as a blank.
ALPHABET = Alphabet(" !$&',-.0123456789:;?ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz")
HOW_TO_GET = (
    "create roles.json.gz from any edition: one JSON object with `users` (a list of names) and "
    "`text` (name → that role's lines), or put LEAF's JSON files into leaf/shakespeare and load "
    "leaf-shakespeare"
)


def shakespeare(folders: Sequence[Path], stride: int = 1, minimum: int = 1) -> Dataset:
    """Return samples of 80 characters by role, each labelled with the next character.

    `stride` is the number of characters from one sample to the next; with 80, samples do not
    overlap. A role with fewer than `minimum` samples is left out. Raises UsageError if either is
    below 1, and BrokenDataset if no role is long enough.
    """
    if stride < 1 or minimum < 1:
        raise UsageError(
            f"shakespeare takes stride and minimum from 1; found {stride} and {minimum}"
        )
    samples = {
        role: windows(ALPHABET.encode(text), stride) for role, text in _find_roles(folders).items()
    }
    roles = {role: pair for role, pair in samples.items() if len(pair[1]) >= minimum}
    if not roles:
        raise BrokenDataset(f"no role of shakespeare has {minimum} samples of {WINDOW} characters")
    sizes = [len(y) for _, y in roles.values()]
    return Dataset(
        name="shakespeare",
        x=np.concatenate([x for x, _ in roles.values()]),
        y=np.concatenate([y for _, y in roles.values()]),
        train_size=sum(sizes),
        classes=ALPHABET.size,
        user=np.repeat(np.arange(len(roles)), sizes),
        user_names=tuple(roles),
        class_names=tuple(ALPHABET.characters),
    )


def _find_roles(folders: Sequence[Path]) -> dict[str, str]:
    forms = [
        Form((f"shakespeare/roles.json{ending}",), lambda paths: read_roles(paths[0]))
        for ending in (".gz", "")
    ]
    return read_first_form("shakespeare", forms, folders, HOW_TO_GET)


def read_roles(path: Path) -> dict[str, str]:
    """Return the text of each role. Raises BrokenDataset if the file has another structure."""
    try:
        with open_plain(path) as file:
            content: Any = json.load(file)
    except UNREADABLE as error:
        raise BrokenDataset(f"cannot read {path}: {error}") from error
    text = content.get("text") if isinstance(content, dict) else None
    if not isinstance(text, dict) or not all(isinstance(lines, str) for lines in text.values()):
        raise BrokenDataset(f"{path} has no object `text` of names and lines")
    return text
