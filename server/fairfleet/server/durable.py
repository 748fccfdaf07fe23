"""Files that are whole or absent after a crash, whenever it comes."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from fairfleet.server import faults


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


def make_folder(path: Path, mode: int = 0o777) -> None:
    """Its name is on the disk when this returns: what is written durably inside would be lost with it.

    Also if it is there already: whoever made it may have died before it was on the disk.
    """
    if not path.parent.exists():
        make_folder(path.parent)
    path.mkdir(exist_ok=True, mode=mode)
    with suppress(PermissionError):  # a parent that we may not read is not of our making
        sync_folder(path.parent)


def sync_file(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        sync(descriptor, path)
    finally:
        os.close(descriptor)


def sync(descriptor: int, path: Path) -> None:
    """An open file's content is on the disk when this returns."""
    os.fsync(descriptor)
    faults.passed(f"fsync of {path.name}")


def sync_folder(path: Path) -> None:
    """Makes the names in a folder durable: a file's own fsync does not cover its name."""
    sync_file(path)
