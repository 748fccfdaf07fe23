"""The tensor files of a state directory: models, what optimizers remember, and updates as they were received.

A file here is nothing yet: it is the federation's once a fact names it (`store`). So each is whole on the disk before
anybody may name it, and what no fact names may go.
"""

from __future__ import annotations

import os
import threading
from collections import Counter, deque
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from fairfleet.common.tensors import Model
from fairfleet.server.durable import make_folder, write_durably
from fairfleet.server.sealed import save_vectors

VECTORS = ".optimizer.safetensors"
FREE_MODEL = "free"  # the file of a model that is not kept any longer, for the next one


class TensorFiles:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._readers: Counter[str] = Counter()  # of model files
        self._readers_lock = threading.Lock()
        self._free_uploads: deque[Path] = deque()  # files of updates that are in a model, for later ones

    def make_folders(self) -> None:
        make_folder(self.folder / "models")
        make_folder(self.folder / "uploads")

    # ---- models --------------------------------------------------------------------------------

    def write_model(self, version: int, model: Model) -> str:
        """Puts a model on the disk; it is the federation's only once a transaction names it."""
        path = self.folder / model_file(version)
        write_durably(path, lambda beside: model.save(beside, version=str(version)), over=path.with_name(FREE_MODEL))
        return model_file(version)

    @contextmanager
    def reading(self, file: str) -> Iterator[Path]:
        """A model's file, which stays as it is meanwhile, even if the model is not kept any longer."""
        with self._readers_lock:
            self._readers[file] += 1
        try:
            yield self.folder / file
        finally:
            with self._readers_lock:
                self._readers[file] -= 1

    def write_vectors(self, version: int, vectors: Mapping[str, NDArray[Any]]) -> str | None:
        """Puts what an optimizer remembers on the disk, beside the model of that version."""
        if not vectors:
            return None
        write_durably(self.folder / vectors_file(version), lambda beside: save_vectors(beside, vectors))
        return vectors_file(version)

    # ---- updates -------------------------------------------------------------------------------

    def upload_path(self, round_number: int, client: str, digest: bytes) -> tuple[Path, bool]:
        """Where an update is kept: a file of its own, new or used; and whether a part of it may be there already."""
        path = self.folder / "uploads" / f"{_round_prefix(round_number)}{client}.{digest.hex()[:16]}"
        if path.exists():
            return path, True
        if self._free_uploads:
            with suppress(FileNotFoundError):
                os.replace(self._free_uploads.pop(), path)
        return path, False

    # ---- what is no longer needed --------------------------------------------------------------

    def delete_unnamed(self, named: Collection[str], current_round: int) -> None:
        """Removes files that no fact speaks of: of older rounds, of models not kept, of interrupted writes."""
        for path in (self.folder / "models").glob("*"):
            if str(path.relative_to(self.folder)) not in named:
                path.unlink(missing_ok=True)
        for path in (self.folder / "uploads").glob("*"):
            if not path.name.startswith(_round_prefix(current_round)):
                path.unlink(missing_ok=True)

    def retire_round(self, version: int, keep: int) -> None:
        """After the commit of a version: one model is too old to be kept, and its round's updates are in the model.

        Their files are not deleted but written over by later ones: blocks that are there need not be found again.
        """
        for path in _named(self.folder / "models", f"{version - keep:08d}."):
            self._retire_model(path)
        for number, path in enumerate(_named(self.folder / "uploads", _round_prefix(version - 1))):
            free = path.with_name(f"free-{version}-{number}")
            os.replace(path, free)
            self._free_uploads.append(free)

    def _retire_model(self, path: Path) -> None:
        with self._readers_lock:
            being_read = self._readers[str(path.relative_to(self.folder))] > 0
            if being_read or path.stat().st_nlink > 1 or path.name.endswith(VECTORS):  # or in a backup of hard links
                path.unlink()
            else:
                os.replace(path, path.with_name(FREE_MODEL))


def model_file(version: int) -> str:
    """Where a model lies, in the state directory."""
    return f"models/{version:08d}.safetensors"


def vectors_file(version: int) -> str:
    return f"models/{version:08d}{VECTORS}"


def _named(folder: Path, prefix: str) -> list[Path]:
    """The files of a folder whose names begin so. (`glob` compiles a pattern that it has not seen, each time.)"""
    return [folder / name for name in os.listdir(folder) if name.startswith(prefix)]


def _round_prefix(round_number: int) -> str:
    return f"{round_number:08d}-"
