"""Decoded arrays kept in the user's cache folder, since unpacking some archives takes many seconds.

Plain .npy files, mapped and not read, never unpickled. An entry notes the state of its source files (path, size, time
of change); one that is broken, or of another state, is made anew, and a cache that cannot be written is done without.
The folder may be deleted at any time.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from fairfleet.lab.datasets.base import Parts

STATE = "sources.json"
VERSION = 3  # of what an entry holds; raise it when a decoder changes


def cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fairfleet" / "datasets" / f"v{VERSION}"


def cached(name: str, sources: Sequence[Path], decode: Callable[[], Parts]) -> Parts:
    """What `decode` makes, from the cache if it was made from the same files before."""
    entry, state = cache_folder() / f"{name}-{_place(sources)}", _state(sources)
    kept = _read(entry, state)
    if kept is None:
        made = decode()
        _write(entry, state, made)
        kept = _read(entry, state) or made  # mapped from now on, so that several processes share the memory
    return kept


def _place(sources: Sequence[Path]) -> str:
    """One for the same files, whatever is in them: a newer state takes the place of the older."""
    return hashlib.sha256(json.dumps([str(path.resolve()) for path in sources]).encode()).hexdigest()[:16]


def _state(sources: Sequence[Path]) -> str:
    files = [file for source in sources for file in (sorted(source.iterdir()) if source.is_dir() else [source])]
    return json.dumps([[str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns] for path in files])


def _read(entry: Path, state: str) -> Parts | None:
    try:
        if (entry / STATE).read_text("utf-8") != state:
            return None
        x = np.load(entry / "x.npy", mmap_mode="r", allow_pickle=False)
        y = np.load(entry / "y.npy", allow_pickle=False)
        train_size = int(np.load(entry / "train_size.npy", allow_pickle=False))
    except (OSError, ValueError, TypeError, EOFError):
        return None
    return Parts(x, y, train_size) if len(x) == len(y) >= train_size else None


def _write(entry: Path, state: str, parts: Parts) -> None:
    """Written beside and renamed: a reader sees a whole entry or none, and of two writers one wins."""
    try:
        entry.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        beside = Path(tempfile.mkdtemp(dir=entry.parent, prefix=".writing-"))
    except OSError:
        return
    try:
        for name, array in parts._asdict().items():
            np.save(beside / f"{name}.npy", array, allow_pickle=False)
        (beside / STATE).write_text(state, "utf-8")
        shutil.rmtree(entry, ignore_errors=True)  # it could not be used; who has it mapped keeps what they have
        beside.rename(entry)
    except OSError:
        pass  # no room, or another process was faster
    finally:
        shutil.rmtree(beside, ignore_errors=True)
