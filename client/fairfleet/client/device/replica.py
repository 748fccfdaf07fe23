"""The number of this process among replicas of one service.

Replicas need no separate name or data set in their configuration. The number is the one at the
end of the host name, as in a StatefulSet, or the lowest one that is free in a shared folder. A
file lock holds it, and the kernel releases the lock however the process ends. A process that is
started as a replacement gets the same number, and with it the same name, data and unsent update.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from filelock import lock_descriptor

from fairfleet.client.device.folder_lock import FolderLock
from fairfleet.common.errors import StateDirError, UsageError

MARK = "{replica}"
MOST = 100_000
Source = Literal["hostname", "claim"]


@contextmanager
def number_of(source: Source, folder: Path) -> Iterator[int]:
    """Provide this replica's number; a claimed number is released at the end of the block."""
    if source == "hostname":
        yield number_in(socket.gethostname())
        return
    number, lock = claim(folder)
    try:
        yield number
    finally:
        lock.release()


def claim(folder: Path) -> tuple[int, FolderLock]:
    """Return the lowest free number and the lock that holds it.

    Raises StateDirError if the folder cannot be used.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return next(
            (number, lock)
            for number in range(MOST)
            if (lock := _try_lock(folder / f"replica-{number}.lock")) is not None
        )
    except OSError as error:
        raise StateDirError(
            f"cannot claim a replica number in {folder}: {error.strerror}. Give a folder that all "
            "replicas share and may write to as --state-dir."
        ) from error


def _try_lock(path: Path) -> FolderLock | None:
    lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        locked = lock_descriptor(lock, blocking=False)
    except OSError:
        os.close(lock)
        raise
    if not locked:
        os.close(lock)
        return None
    return FolderLock(lock)


def number_in(host_name: str) -> int:
    """Return the number at the end of a host name. Raises UsageError if there is none.

    >>> number_in("fairfleet-client-12")
    12
    """
    match = re.search(r"(?:^|-)(\d+)$", host_name)
    if not match:
        raise UsageError(
            f"replica: hostname, but the host name {host_name!r} does not end in a number, as in "
            "client-3. Use a StatefulSet, or replica: claim."
        )
    return int(match[1])
