"""A lock on a folder, so that one process at a time uses the state in it.

The kernel releases the lock however its process ends. Processes that this one forks, such as the
workers of a DataLoader, do not hold it: they may outlive a process that is killed. The lock file
names the process that holds it, for people.
"""

from __future__ import annotations

import logging
import os
from contextlib import suppress
from pathlib import Path
from weakref import WeakSet

from filelock import lock_descriptor, unlock_descriptor

log = logging.getLogger(__name__)

FILE = "lock"


class FolderLock:
    """A held lock; `release` or the end of the process frees it."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor: int | None = descriptor
        _HELD.add(self)

    def release(self) -> None:
        """Free the lock. Safe to repeat.

        It is freed before the file is closed: a process that was forked without Python's knowledge
        has the file open too, and would keep the lock.
        """
        if self._descriptor is not None:
            with suppress(OSError):  # a file system without locks
                unlock_descriptor(self._descriptor)
            self._close()

    def _close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


_HELD: WeakSet[FolderLock] = WeakSet()


def _close_in_fork() -> None:
    """Close the files in a process that was just forked; the locks stay with its parent."""
    for lock in list(_HELD):
        lock._close()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_close_in_fork)


def try_lock(folder: Path, name: str = FILE) -> FolderLock | None:
    """Return the lock of a folder, or None if another process holds it.

    Raises OSError if the file cannot be opened. A file system without locks is used without one.
    """
    descriptor = os.open(folder / name, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        locked = lock_descriptor(descriptor, blocking=False)
    except OSError as error:
        log.warning("%s cannot be locked (%s): let only one process use it", folder, error.strerror)
        return FolderLock(descriptor)
    except BaseException:
        os.close(descriptor)
        raise
    if not locked:
        os.close(descriptor)
        return None
    os.ftruncate(descriptor, 0)
    os.lseek(descriptor, 0, os.SEEK_SET)
    os.write(descriptor, str(os.getpid()).encode())
    return FolderLock(descriptor)


def holder(folder: Path, name: str = FILE) -> str:
    """Return the number of the process that holds the lock, or `unknown`."""
    try:
        text = (folder / name).read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        text = ""
    return text[:32] or "unknown"
