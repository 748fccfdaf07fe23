"""Write files that are complete or absent, also after a crash or a power cut.

`write_atomically` fills a temporary file in the same folder, makes it durable, and gives it its
name by one rename. Readers therefore see the earlier content or the new one, never a part of it.
A temporary file that a killed process leaves is overwritten by the next write of the same file.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from enum import Enum
from pathlib import Path

TEMP_SUFFIX = ".new"
WINDOWS = os.name == "nt"


class Sync(Enum):
    """What is fsynced before `write_atomically` returns."""

    NOTHING = "nothing"  # after a power cut the file may be damaged; its reader must notice
    FILE = "file"  # the caller fsyncs the folder, for example once for many files
    FILE_AND_FOLDER = "file and folder"


def fsync_path(path: Path) -> None:
    """Make the content of a file durable, or the names in a folder.

    Windows opens no folder, and flushes only files that are open for writing.
    """
    if WINDOWS and path.is_dir():
        return
    descriptor = os.open(path, os.O_RDWR if WINDOWS else os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomically(
    path: Path,
    content: bytes | Callable[[Path], object],
    *,
    mode: int | None = None,
    sync: Sync = Sync.FILE_AND_FOLDER,
    fsync: Callable[[Path], None] = fsync_path,
    reuse: Path | None = None,
    temp_suffix: str = TEMP_SUFFIX,
) -> None:
    """Write a file completely or leave it as it was.

    `content` is the bytes, or a function that writes them to the path that it is given. `mode` is
    for private files of bytes: the file has exactly this mode before its first byte is written.
    `fsync` replaces the function that makes a file or a folder durable. `reuse` is a file in the
    same folder that is not needed any longer: if it exists, the new content overwrites it, because
    a file that has its blocks already is written faster. Several processes that may write the same
    path at once need different values of `temp_suffix`.

    Raises what `content` raises, and OSError; the temporary file is then removed.
    """
    temp_path = path.with_name(path.name + temp_suffix)
    try:
        if reuse is not None:
            with suppress(FileNotFoundError):
                os.replace(reuse, temp_path)
        if callable(content):
            content(temp_path)
        elif mode is not None:
            _write_private(temp_path, content, mode)
        else:
            temp_path.write_bytes(content)
        if sync is not Sync.NOTHING:
            fsync(temp_path)
        os.replace(temp_path, path)
    except BaseException:
        with suppress(OSError):
            temp_path.unlink()
        raise
    if sync is Sync.FILE_AND_FOLDER:
        # A folder that this user may write but not read cannot be opened for its fsync.
        with suppress(PermissionError):
            fsync(path.parent)


def _write_private(path: Path, content: bytes, mode: int) -> None:
    """Write a new file through its own descriptor: nobody can put another file in its place."""
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with open(descriptor, "wb") as file:
        if hasattr(os, "fchmod"):  # not on Windows
            os.fchmod(descriptor, mode)  # the umask may have removed permissions
        file.write(content)
