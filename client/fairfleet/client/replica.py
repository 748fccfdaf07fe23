"""Which of several like clients this process is: replicas of one service need no name or data set written for each.

The number is the one at the end of the host name, as a StatefulSet gives it, or the lowest that no other process
holds in a folder that they share. A lock holds it, which the kernel lets go however the process ends: whoever is
started in its stead takes the same number, and with it the same name, data and unsent update.
"""

from __future__ import annotations

import fcntl
import os
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from fairfleet.common.errors import StateDirError, UsageError

MARK = "{replica}"
MOST = 100_000
Source = Literal["hostname", "claim"]


@contextmanager
def number_of(source: Source, folder: Path) -> Iterator[int]:
    if source == "hostname":
        yield number_in(socket.gethostname())
        return
    number, lock = claim(folder)
    try:
        yield number
    finally:
        os.close(lock)


def claim(folder: Path) -> tuple[int, int]:
    """The lowest number that is free, and the open lock that makes it ours."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return next(
            (number, lock) for number in range(MOST) if (lock := _locked(folder / f"replica-{number}.lock")) is not None
        )
    except OSError as error:
        raise StateDirError(
            f"cannot claim a replica number in {folder}: {error.strerror}. Give a folder that all replicas share "
            "and may write to as --state-dir."
        ) from error


def _locked(path: Path) -> int | None:
    lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return None
    return lock


def number_in(host_name: str) -> int:
    """
    >>> number_in("fairfleet-client-12")
    12
    """
    found = re.search(r"(?:^|-)(\d+)$", host_name)
    if not found:
        raise UsageError(
            f"replica: hostname, but the host name {host_name!r} does not end in a number, as in client-3. "
            "Use a StatefulSet, or replica: claim."
        )
    return int(found[1])
