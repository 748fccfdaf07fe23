"""Folders and files that are nobody else's business: where models and updates lie, and what holds a secret.

Secrets are written so that only their owner can read them, and refused where others can.
"""

from __future__ import annotations

import logging
import os
import stat
from pathlib import Path

from fairfleet.common.errors import UsageError

log = logging.getLogger(__name__)

FOLDER_MODE, FILE_MODE = 0o700, 0o600
TOO_OPEN = stat.S_IWGRP | stat.S_IXGRP | stat.S_IRWXO  # a group may read: so Kubernetes mounts secrets

OTHERS = stat.S_IRWXG | stat.S_IRWXO


def tighten(folder: Path) -> None:
    """Takes from others what they may do in a folder of ours; of one that is another's, says that they may.

    A folder that somebody made beforehand, or an older version of this program, may be open to all. A volume that an
    orchestrator mounts belongs to root, and is for the pod alone anyway: there is nothing to take.
    """
    found = folder.stat()
    if not found.st_mode & OTHERS:
        return
    mode = stat.S_IMODE(found.st_mode)
    if found.st_uid == os.geteuid():
        folder.chmod(mode & ~OTHERS)
        log.warning("%s was open to other users (mode %o); it is ours alone now", folder, mode)
    else:
        log.warning("%s belongs to another user and is open to others (mode %o); use one of your own", folder, mode)


def make_private_folder(path: Path) -> None:
    try:
        path.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
        path.chmod(FOLDER_MODE)
    except OSError as error:
        raise UsageError(f"cannot make the folder {path}: {error.strerror}") from error


def write_private(path: Path, content: bytes, mode: int = FILE_MODE) -> None:
    """Whole or not at all, and never, not for an instant, readable by others."""
    beside = path.with_name(f".{path.name}.part")
    try:
        beside.unlink(missing_ok=True)
        descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with open(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(beside, mode)  # whatever the umask made of it
        os.replace(beside, path)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from error


def read_private(path: Path, what: str) -> bytes:
    """Refuses a secret that others on this machine can read: it may be in their hands."""
    try:
        with open(path, "rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            if mode & TOO_OPEN:
                raise UsageError(
                    f"{path} holds {what} and has mode {mode:04o}: others can read or change it. If nobody has, "
                    f"`chmod 600 {path}`; else make a new one."
                )
            return file.read()
    except OSError as error:
        raise UsageError(f"cannot read {what} in {path}: {error.strerror}") from error
