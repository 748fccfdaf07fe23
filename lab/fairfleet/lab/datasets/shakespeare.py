"""Shakespeare by role: each speaking role is a client, each sample 80 characters and the one that follows.

Read from `roles.json.gz` (a role's lines, public-domain text); LEAF's own files are read by `leaf`.
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
from fairfleet.lab.datasets.places import Form, find
from fairfleet.lab.datasets.text import WINDOW, Alphabet, windows

# Every character of the text but the end of a line, which is a blank between two lines.
ALPHABET = Alphabet(" !$&',-.0123456789:;?ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz")
HOW_TO_GET = (
    "make roles.json.gz from any edition: one JSON object with `users` (a list of names) and `text` (name → that "
    "role's lines), or put LEAF's JSON files into leaf/shakespeare and load leaf-shakespeare"
)


def shakespeare(folders: Sequence[Path], stride: int = 1, minimum: int = 1) -> Dataset:
    """`stride`: characters from one sample to the next, 80 for samples that do not overlap; `minimum`: per role."""
    if stride < 1 or minimum < 1:
        raise UsageError(f"shakespeare takes stride and minimum from 1; found {stride} and {minimum}")
    forms = [Form((f"shakespeare/roles.json{ending}",), lambda paths: read_roles(paths[0])) for ending in (".gz", "")]
    roles = find("shakespeare", forms, folders, HOW_TO_GET)
    found = {role: windows(ALPHABET.encode(text), stride) for role, text in roles.items()}
    kept = {role: sample for role, sample in found.items() if len(sample[1]) >= minimum}
    if not kept:
        raise BrokenDataset(f"no role of shakespeare has {minimum} samples of {WINDOW} characters")
    sizes = [len(y) for _, y in kept.values()]
    return Dataset(
        name="shakespeare",
        x=np.concatenate([x for x, _ in kept.values()]),
        y=np.concatenate([y for _, y in kept.values()]),
        train_size=sum(sizes),
        classes=ALPHABET.size,
        user=np.repeat(np.arange(len(kept)), sizes),
        user_names=tuple(kept),
        class_names=tuple(ALPHABET.characters),
    )


def read_roles(path: Path) -> dict[str, str]:
    try:
        with open_plain(path) as file:
            content: Any = json.load(file)
    except UNREADABLE as error:
        raise BrokenDataset(f"cannot read {path}: {error}") from error
    text = content.get("text") if isinstance(content, dict) else None
    if not isinstance(text, dict) or not all(isinstance(lines, str) for lines in text.values()):
        raise BrokenDataset(f"{path} has no object `text` of names and lines")
    return text
