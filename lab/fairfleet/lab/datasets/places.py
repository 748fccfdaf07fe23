"""Where datasets may be, and finding one there: `--data-dir`, then FAIRFLEET_DATA, then the system's own folder.

A dataset has several forms (as published, as an archive, as npz); the first whose files are all there is read.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from fairfleet.lab.datasets.base import MissingDataset

VARIABLE = "FAIRFLEET_DATA"
SYSTEM_FOLDER = Path("/usr/share/datasets")  # where Debian's dataset packages put theirs

T = TypeVar("T")


@dataclass(frozen=True)
class Form(Generic[T]):
    """One way in which a dataset may lie in a data folder."""

    files: tuple[str, ...]  # relative to the folder; a form is there when all of them are
    read: Callable[[Sequence[Path]], T]


def data_folders(data_dir: Path | None) -> list[Path]:
    """Every folder to look in, the most explicit first."""
    named = [Path(part) for part in os.environ.get(VARIABLE, "").split(os.pathsep) if part]
    return [*([data_dir] if data_dir else []), *named, SYSTEM_FOLDER]


def find(name: str, forms: Sequence[Form[T]], folders: Sequence[Path], how_to_get: str) -> T:
    for folder in folders:
        for form in forms:
            paths = [folder / file for file in form.files]
            if all(path.exists() for path in paths):
                return form.read(paths)
    raise MissingDataset(_explain(name, forms, folders, how_to_get))


def _explain(name: str, forms: Sequence[Form[T]], folders: Sequence[Path], how_to_get: str) -> str:
    accepted = "\n".join(f"  - {_listed(form.files)}" for form in forms)
    halves = [note for folder in folders for form in forms if (note := _half_there(folder, form))]
    return "\n".join(
        [
            f"the dataset {name} is not in {' nor in '.join(map(str, folders))}.",
            *halves[:1],
            f"A folder given by --data-dir or {VARIABLE} may hold it in any of these forms:",
            accepted,
            f"How to get it: {how_to_get}",
        ]
    )


def _half_there(folder: Path, form: Form[T]) -> str:
    missing = [file for file in form.files if not (folder / file).exists()]
    if len(missing) == len(form.files):
        return ""
    return f"In {folder} only a part of it was found: {_listed(missing)} is missing."


def _listed(files: Sequence[str]) -> str:
    return ", ".join(files) if len(files) <= 4 else f"{files[0]}, {files[1]}, …, {files[-1]} ({len(files)} files)"
