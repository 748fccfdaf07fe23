"""The search for the files of a dataset in the data folders.

The folders are `--data-dir`, then those of FAIRFLEET_DATA, then the folder of the system. A
dataset has several forms (as published, as an archive, as npz); the first form whose files all
exist is read. If there is none, the error says which files are accepted and how to get them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from fairfleet.lab.datasets.base import MissingDataset

VARIABLE = "FAIRFLEET_DATA"
SYSTEM_FOLDER = Path("/usr/share/datasets")  # Debian's dataset packages install here.

T = TypeVar("T")


@dataclass(frozen=True)
class Form(Generic[T]):
    """One set of files in which a data folder may contain a dataset."""

    files: tuple[str, ...]  # Relative to the folder; all of them must exist.
    read: Callable[[Sequence[Path]], T]


def data_folders(data_dir: Path | None) -> list[Path]:
    """Return the folders to search, the most explicit first."""
    listed = [Path(part) for part in os.environ.get(VARIABLE, "").split(os.pathsep) if part]
    return [*([data_dir] if data_dir else []), *listed, SYSTEM_FOLDER]


def read_first_form(
    name: str, forms: Sequence[Form[T]], folders: Sequence[Path], how_to_get: str
) -> T:
    """Read the first form of a dataset whose files all exist in one of the folders.

    Raises MissingDataset, with the accepted files and `how_to_get`, if there is none.
    """
    for folder in folders:
        for form in forms:
            paths = [folder / file for file in form.files]
            if all(path.exists() for path in paths):
                return form.read(paths)
    raise MissingDataset(_explain(name, forms, folders, how_to_get))


def _explain(name: str, forms: Sequence[Form[T]], folders: Sequence[Path], how_to_get: str) -> str:
    accepted_forms = "\n".join(f"  - {_listed(form.files)}" for form in forms)
    partial = [
        note for folder in folders for form in forms if (note := _missing_files(folder, form))
    ]
    return "\n".join(
        [
            f"the dataset {name} is not in {' nor in '.join(map(str, folders))}.",
            *partial[:1],
            f"A folder given by --data-dir or {VARIABLE} may contain it in any of these forms:",
            accepted_forms,
            f"How to get it: {how_to_get}",
        ]
    )


def _missing_files(folder: Path, form: Form[T]) -> str:
    """Return a note about the missing files, or nothing if the folder has none of the files."""
    missing = [file for file in form.files if not (folder / file).exists()]
    if len(missing) == len(form.files):
        return ""
    return f"In {folder} only a part of it was found: {_listed(missing)} is missing."


def _listed(files: Sequence[str]) -> str:
    return (
        ", ".join(files)
        if len(files) <= 4
        else f"{files[0]}, {files[1]}, …, {files[-1]} ({len(files)} files)"
    )
