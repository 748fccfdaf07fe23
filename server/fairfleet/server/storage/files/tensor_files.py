"""The tensor files of a state directory: models, optimizers' vectors, and updates as received.

A file belongs to the federation once a row of the database names it. So each file is complete on
the disk before it is named, and a file that no row names may be deleted.
"""

from __future__ import annotations

import os
import threading
from collections import Counter, deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from fairfleet.common.tensors import Model
from fairfleet.server.storage.files.checksummed_arrays import save_vectors
from fairfleet.server.storage.files.durable_files import make_folder, sync_path, write_durably

VECTORS = ".optimizer.safetensors"
QUARANTINE = "quarantine"
FREE_MODEL = "free"  # the file of a model that is not kept any more, reused for the next one
NO_METADATA: Mapping[str, str] = {}


class TensorFiles:
    """Reads, writes and retires the tensor files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._readers: Counter[str] = Counter()  # of model files
        self._readers_lock = threading.Lock()
        # Files of updates that a model contains, reused for later updates.
        self._free_uploads: deque[Path] = deque()

    def make_folders(self) -> None:
        """Create the folders of models and updates."""
        make_folder(self.folder / "models")
        make_folder(self.folder / "uploads")

    # ---- models --------------------------------------------------------------------------------

    def has_models(self, *, after_the_first: bool = False) -> bool:
        """Return whether there are files of models, or such of versions after version 0."""
        paths = (self.folder / "models").glob("*.safetensors")
        first = f"{0:08d}."
        return any(not (after_the_first and path.name.startswith(first)) for path in paths)

    def write_model(
        self, version: int, model: Model, metadata: Mapping[str, str] = NO_METADATA
    ) -> str:
        """Write a model durably, with metadata; return the file's name for the database."""
        path = self.folder / model_file(version)
        fields = {**metadata, "version": str(version)}
        write_durably(
            path,
            lambda temp_path: model.save(temp_path, **fields),
            reuse=path.with_name(FREE_MODEL),
        )
        return model_file(version)

    @contextmanager
    def reading(self, file: str) -> Iterator[Path]:
        """Provide a model's file, which does not change while the block runs.

        The model may be retired meanwhile.
        """
        with self._readers_lock:
            self._readers[file] += 1
        try:
            yield self.folder / file
        finally:
            with self._readers_lock:
                self._readers[file] -= 1

    def write_vectors(self, version: int, vectors: Mapping[str, NDArray[Any]]) -> str | None:
        """Write an optimizer's vectors durably; return the file's name, or None without any."""
        if not vectors:
            return None
        write_durably(self.folder / vectors_file(version), partial(save_vectors, vectors=vectors))
        return vectors_file(version)

    # ---- updates -------------------------------------------------------------------------------

    def upload_path(self, round_number: int, client: str, digest: bytes) -> tuple[Path, bool]:
        """Return the file of an update, and whether it may hold a part of the update already.

        A file that does not exist yet may reuse one of an earlier update.
        """
        name = f"{_round_prefix(round_number)}{client}.{digest.hex()[:16]}"
        path = self.folder / "uploads" / name
        if path.exists():
            return path, True
        if self._free_uploads:
            with suppress(FileNotFoundError):
                os.replace(self._free_uploads.pop(), path)
        return path, False

    def quarantine(self, file: str | None) -> str | None:
        """Link an update's file into the quarantine, where it stays after its round.

        Copies the file if the file system has no hard links.
        """
        if file is None:
            return None
        path = self.folder / QUARANTINE / Path(file).name
        make_folder(path.parent)
        try:
            os.link(self.folder / file, path)
        except FileExistsError:
            pass  # linked before a crash
        except OSError:
            write_durably(path, (self.folder / file).read_bytes())
        sync_path(path.parent)
        return str(path.relative_to(self.folder))

    def clear_quarantine(self, named: Collection[str]) -> None:
        """Delete the files in the quarantine that the database does not name any more."""
        for path in (self.folder / QUARANTINE).glob("*"):
            if str(path.relative_to(self.folder)) not in named:
                path.unlink(missing_ok=True)

    # ---- files that are not needed any more ----------------------------------------------------

    def delete_unnamed(self, named: Collection[str], current_round: int) -> None:
        """Delete files of older rounds, of models not kept, and of interrupted writes."""
        for path in (self.folder / "models").glob("*"):
            if str(path.relative_to(self.folder)) not in named:
                path.unlink(missing_ok=True)
        for path in (self.folder / "uploads").glob("*"):
            if not path.name.startswith(_round_prefix(current_round)):
                path.unlink(missing_ok=True)

    def retire_round(self, version: int, released: Iterable[int]) -> None:
        """Free the files that the commit of a version made obsolete.

        These are the models of the `released` versions, and the updates of the committed round.
        Later files overwrite them, which is faster than to allocate their blocks again.
        """
        for model in released:
            for path in _with_prefix(self.folder / "models", f"{model:08d}."):
                self._retire_model(path)
        uploads = _with_prefix(self.folder / "uploads", _round_prefix(version - 1))
        for number, path in enumerate(uploads):
            if _is_linked(path):
                path.unlink()
                continue
            free_path = path.with_name(f"free-{version}-{number}")
            os.replace(path, free_path)
            self._free_uploads.append(free_path)

    def _retire_model(self, path: Path) -> None:
        with self._readers_lock:
            being_read = self._readers[str(path.relative_to(self.folder))] > 0
            if being_read or _is_linked(path) or path.name.endswith(VECTORS):
                path.unlink()
            else:
                os.replace(path, path.with_name(FREE_MODEL))


def model_file(version: int) -> str:
    """Return the file of a model, relative to the state directory."""
    return f"models/{version:08d}.safetensors"


def vectors_file(version: int) -> str:
    """Return the file of the optimizer's vectors, relative to the state directory."""
    return f"models/{version:08d}{VECTORS}"


def _is_linked(path: Path) -> bool:
    """Return whether the file has another name, in the quarantine or in a backup."""
    return path.stat().st_nlink > 1


def _with_prefix(folder: Path, prefix: str) -> list[Path]:
    """Return the files whose names begin with this prefix.

    It does not use `glob`, which compiles a regular expression for each new prefix.
    """
    return [folder / name for name in os.listdir(folder) if name.startswith(prefix)]


def _round_prefix(round_number: int) -> str:
    return f"{round_number:08d}-"
