"""Files that are whole or absent after a crash, whenever it comes."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path


def write_durably(path: Path, write: Callable[[Path], None], over: Path | None = None) -> None:
    """`write` fills a file beside `path`; it takes its name only when it is on the disk.

    It gets the file `over`, if there is one, to write over.
    """
    beside = path.with_name(path.name + ".new")
    if over is not None:
        with suppress(FileNotFoundError):
            os.replace(over, beside)
    write(beside)
    sync_file(beside)
    os.replace(beside, path)
    sync_folder(path.parent)


def sync_file(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_folder(path: Path) -> None:
    """Makes the names in a folder durable: a file's own fsync does not cover its name."""
    sync_file(path)
