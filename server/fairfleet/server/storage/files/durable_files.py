"""Files and folders that exist after a power cut, with a crash point after every fsync.

The functions of `fairfleet.common.atomic_files` do the work. This module adds the points at which
tests kill the server.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from fairfleet.common.atomic_files import Sync, fsync_path, write_atomically
from fairfleet.server.storage import crash_points


def write_durably(
    path: Path,
    content: bytes | Callable[[Path], object],
    *,
    sync: Sync = Sync.FILE_AND_FOLDER,
    reuse: Path | None = None,
) -> None:
    """Write a file atomically; see `write_atomically` for the parameters."""
    write_atomically(path, content, sync=sync, fsync=sync_path, reuse=reuse)


def make_folder(path: Path, mode: int = 0o777) -> None:
    """Create a folder, with its parents, whose name is on the disk when this returns.

    Otherwise a power cut could lose the name, and with it everything inside. The name of an
    existing folder is synced too, because its creator may have died before it was on the disk.
    """
    if not path.parent.exists():
        make_folder(path.parent)
    path.mkdir(exist_ok=True, mode=mode)
    with suppress(PermissionError):  # this process did not create a parent that it may not read
        sync_path(path.parent)


def sync_path(path: Path) -> None:
    """Make the content of a file durable, or the names in a folder.

    The fsync of a file does not cover its name: that is part of the folder.
    """
    fsync_path(path)
    crash_points.passed(f"fsync of {path.name}")


def sync_open_file(descriptor: int, path: Path) -> None:
    """Make the content of an open file durable."""
    os.fsync(descriptor)
    crash_points.passed(f"fsync of {path.name}")
