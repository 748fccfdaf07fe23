"""A cache of decoded arrays in the user's cache folder, since some archives unpack slowly.

An entry consists of plain .npy files, which are memory-mapped and never unpickled. It notes the
state of its source files (path, size, time of change). An entry that is broken, or whose source
files have changed, is rebuilt; if the cache cannot be written, the data are decoded each time.
The folder may be deleted at any time.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from platformdirs.unix import Unix

from fairfleet.lab.datasets.base import Parts

STATE_FILE = "sources.json"
VERSION = 3  # Version of the content of an entry. Increase it when a decoder changes.


def cache_folder() -> Path:
    """Return the folder of the cache entries: in ~/.cache/fairfleet, or in XDG_CACHE_HOME."""
    return Unix("fairfleet", appauthor=False).user_cache_path / "datasets" / f"v{VERSION}"


def load_cached(name: str, sources: Sequence[Path], decode: Callable[[], Parts]) -> Parts:
    """Return the result of `decode`, from the cache if the same files were decoded before."""
    entry, state = cache_folder() / f"{name}-{_source_key(sources)}", _source_state(sources)
    cached = _read(entry, state)
    if cached is not None:
        return cached
    decoded = decode()
    _write(entry, state, decoded)
    # The entry is read back as a memory map, so that several processes share the memory.
    return _read(entry, state) or decoded


def _source_key(sources: Sequence[Path]) -> str:
    """Return a key of the paths alone, so that a newer state of the files replaces the older."""
    paths = json.dumps([str(path.resolve()) for path in sources])
    return hashlib.sha256(paths.encode()).hexdigest()[:16]


def _source_state(sources: Sequence[Path]) -> str:
    files = [
        file
        for source in sources
        for file in (sorted(source.iterdir()) if source.is_dir() else [source])
    ]
    return json.dumps(
        [[str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns] for path in files]
    )


def _read(entry: Path, state: str) -> Parts | None:
    try:
        if (entry / STATE_FILE).read_text("utf-8") != state:
            return None
        x = np.load(entry / "x.npy", mmap_mode="r", allow_pickle=False)
        y = np.load(entry / "y.npy", allow_pickle=False)
        train_size = int(np.load(entry / "train_size.npy", allow_pickle=False))
    except (OSError, ValueError, TypeError, EOFError):
        return None
    return Parts(x, y, train_size) if len(x) == len(y) >= train_size else None


def _write(entry: Path, state: str, parts: Parts) -> None:
    """Write to a temporary folder and rename it, so that a reader never sees half an entry.

    If two processes write the same entry, one of them wins.
    """
    try:
        entry.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        temp_folder = Path(tempfile.mkdtemp(dir=entry.parent, prefix=".writing-"))
    except OSError:
        return
    try:
        for name, array in parts._asdict().items():
            np.save(temp_folder / f"{name}.npy", array, allow_pickle=False)
        (temp_folder / STATE_FILE).write_text(state, "utf-8")
        # The old entry was not usable. A process that has mapped it keeps its data.
        shutil.rmtree(entry, ignore_errors=True)
        temp_folder.rename(entry)
    except OSError:
        pass  # The disk is full, or another process was faster.
    finally:
        shutil.rmtree(temp_folder, ignore_errors=True)
