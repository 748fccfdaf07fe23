"""Folders and files that only their owner may read: state directories and secrets.

Secrets are written so that only their owner can read them, and refused if others can read them.
On Windows a file's mode says nothing about who can read it, so there the folder must protect them.
"""

from __future__ import annotations

import logging
import os
import stat
from pathlib import Path

from fairfleet.common.atomic_files import Sync, write_atomically
from fairfleet.common.errors import UsageError

log = logging.getLogger(__name__)

FOLDER_MODE, FILE_MODE = 0o700, 0o600
# The group may read a secret, because Kubernetes mounts secrets with this mode.
TOO_OPEN = stat.S_IWGRP | stat.S_IXGRP | stat.S_IRWXO
OTHERS = stat.S_IRWXG | stat.S_IRWXO
HAS_OWNERS = hasattr(os, "geteuid")  # not on Windows


def tighten(folder: Path) -> None:
    """Remove other users' permissions on our folder; only warn if another user owns the folder.

    A folder that a user or an older version created may be open to all. A volume that an
    orchestrator mounts belongs to root and is only for the pod, so its mode does not matter.
    """
    status = folder.stat()
    if not HAS_OWNERS or not status.st_mode & OTHERS:
        return
    mode = stat.S_IMODE(status.st_mode)
    if status.st_uid == os.geteuid():
        folder.chmod(mode & ~OTHERS)
        log.warning(
            "%s was open to other users (mode %o); only its owner has access now", folder, mode
        )
    else:
        log.warning(
            "%s belongs to another user and is open to others (mode %o); use one of your own",
            folder,
            mode,
        )


def make_private_folder(path: Path) -> None:
    """Create a folder, with its parents, that only its owner may use (mode 0700)."""
    try:
        path.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
        path.chmod(FOLDER_MODE)
    except OSError as error:
        raise UsageError(f"cannot make the folder {path}: {error.strerror}") from error


def write_private(path: Path, content: bytes, mode: int = FILE_MODE) -> None:
    """Write a file completely or not at all. At no moment can others read it.

    Raises UsageError if it cannot be written.
    """
    try:
        # Earlier versions wrote to this file first, and left it if they were killed.
        path.with_name(f".{path.name}.part").unlink(missing_ok=True)
        write_atomically(path, content, mode=mode, sync=Sync.FILE)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from error


def read_private(path: Path, what: str) -> bytes:
    """Return the content of a secret file.

    Raises UsageError if others on this machine can read or change it, because they may have.
    """
    try:
        with open(path, "rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            if HAS_OWNERS and mode & TOO_OPEN:
                raise UsageError(
                    f"{path} holds {what} and has mode {mode:04o}: others can read or change it. "
                    f"If no one did, run `chmod 600 {path}`; otherwise make a new one."
                )
            return file.read()
    except OSError as error:
        raise UsageError(f"cannot read {what} in {path}: {error.strerror}") from error
