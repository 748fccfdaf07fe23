"""The folder with a client's state of one federation, and its lock.

A federation has a folder of its own inside the client's, named by the federation's id. So several
federations can use one device under the same client name. Versions up to 0.1.0 kept the state in
the client's folder itself: `take_over` moves it. For a server without federation ids, the client's
folder is still used.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from fairfleet.client.device.folder_lock import FILE as LOCK_FILE
from fairfleet.client.device.folder_lock import FolderLock, holder, try_lock
from fairfleet.client.update.pending_vector import owner_in, owner_of
from fairfleet.common.atomic_files import Sync, write_atomically
from fairfleet.common.errors import BadRequest, StateDirError, short
from fairfleet.common.pki.private_files import tighten
from fairfleet.common.tensors import Signature

log = logging.getLogger(__name__)

LOCK_SECONDS = 60.0  # a process that was replaced ends within a heartbeat, normally
RETRY_SECONDS = 0.5
MOVING = "moving.lock"  # held while state of an earlier version is moved
DESCRIPTION = "federation.json"  # for people, who cannot tell what an id stands for
HEADER, CHUNKS, PERSONAL = "update.json", "update.chunks", "personal.safetensors"
VECTORS = ("residual", "residual.pending", "last", "last.pending")
STATE = (*VECTORS, PERSONAL, CHUNKS, HEADER)  # what a client keeps of a federation


@dataclass(frozen=True)
class FederationIdentity:
    """A federation, as the server describes it when a client joins."""

    name: str
    id: str  # a UUID; empty: the server is older than these ids
    signature: Signature


@dataclass(frozen=True)
class FederationFolder:
    """A folder that only this process uses until `close`."""

    path: Path
    lock: FolderLock

    def close(self) -> None:
        """Let another process use the folder."""
        self.lock.release()

    @property
    def is_deleted(self) -> bool:
        """Whether the folder, or what is in it, was deleted although this process uses it."""
        return not (self.path / LOCK_FILE).exists()


def prepare_folder(folder: Path) -> None:
    """Create a folder, or raise StateDirError now rather than after a training."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        tighten(folder)
    except OSError as error:
        raise unusable(folder, error) from error


def open_folder(
    home: Path,
    federation: FederationIdentity,
    pause: Callable[[float], None],
    clock: Callable[[], float] = time.monotonic,
) -> FederationFolder:
    """Return the locked folder of a federation; `home` is the client's own folder.

    While another process holds it, `pause` is called with seconds to wait. Raises StateDirError if
    it is still held after LOCK_SECONDS, and BadRequest if the id is not a UUID.
    """
    folder = home / _checked(federation.id) if federation.id else home
    prepare_folder(folder)
    lock = _wait_for_lock(folder, federation, pause, clock)
    if federation.id:
        try:
            _describe(folder, federation)
            take_over(home, folder, federation)
        except OSError as error:
            lock.release()
            raise unusable(folder, error) from error
    return FederationFolder(folder, lock)


def _checked(federation_id: str) -> str:
    """Return the id if it is a UUID: it becomes the name of a folder."""
    try:
        if str(uuid.UUID(federation_id)) == federation_id:
            return federation_id
    except ValueError:
        pass
    raise BadRequest(
        f"the server's federation id is {short(federation_id)!r}; expected a UUID in lower case"
    )


def _wait_for_lock(
    folder: Path,
    federation: FederationIdentity,
    pause: Callable[[float], None],
    clock: Callable[[], float],
) -> FolderLock:
    if (lock := _locked(folder)) is not None:
        return lock
    began = clock()
    log.info(
        "%s is in use by process %s; waiting for its end, at most %g s",
        folder,
        holder(folder),
        LOCK_SECONDS,
    )
    while (lock := _locked(folder)) is None:
        if clock() - began >= LOCK_SECONDS:
            raise StateDirError(
                f"{folder} is in use by another process ({holder(folder)}) of this client and "
                f"federation {short(federation.name)}. Stop that process, or give this one its own "
                "--name or --state-dir."
            )
        pause(RETRY_SECONDS)
    return lock


def _locked(folder: Path) -> FolderLock | None:
    try:
        return try_lock(folder)
    except OSError as error:
        raise unusable(folder, error) from error


def unusable(folder: Path, error: OSError) -> StateDirError:
    """Return the error for a folder in which nothing can be written."""
    return StateDirError(
        f"cannot keep unsent updates in {folder}: {error.strerror}. "
        "Give a directory that this user can write to as --state-dir."
    )


def _describe(folder: Path, federation: FederationIdentity) -> None:
    """Write which federation the folder belongs to, unless that is written already."""
    text = json.dumps({"federation": federation.name, "id": federation.id}).encode()
    path = folder / DESCRIPTION
    if not path.exists() or path.read_bytes() != text:
        write_atomically(path, text, sync=Sync.NOTHING)


# ---- the state of earlier versions -------------------------------------------------------------


def take_over(home: Path, folder: Path, federation: FederationIdentity) -> list[str]:
    """Move what an earlier version kept of this federation; return the names of the moved files.

    The files of other federations stay, and so does everything while a client uses the old folder.
    """
    if not any((home / name).exists() for name in STATE):
        return []
    moving = _wait_until_nobody_moves(home)
    try:
        in_use = try_lock(home)
        if in_use is None:
            return []
        try:
            moved = [name for name in _owned(home, federation) if _move(name, home, folder)]
        finally:
            in_use.release()
    finally:
        moving.release()
    if moved:
        log.info("the state of an earlier version was moved to %s: %s", folder, ", ".join(moved))
    return moved


def _wait_until_nobody_moves(home: Path) -> FolderLock:
    while (lock := try_lock(home, MOVING)) is None:  # it takes a few renames
        time.sleep(0.05)
    return lock


def _owned(home: Path, federation: FederationIdentity) -> list[str]:
    """Return the files that belong to a federation, in the order in which they are to be moved.

    The header comes last: only with it does an update exist. The personal model names no
    federation. It goes with the other files; alone, it goes to the first federation that asks.
    """
    accepted = {
        owner_of(name, federation.signature)
        for name in (federation.name, f"{federation.name}, with noise")
    }
    recorded = {name: owner_in(home / name) for name in VECTORS}
    own = [name for name, owner in recorded.items() if owner in accepted]
    writer = _federation_in(home / HEADER)
    has_update = writer == federation.name
    is_foreign = any(recorded[name] for name in VECTORS if name not in own) or (
        writer is not None and not has_update
    )
    goes_along = own or has_update or not is_foreign
    chunks = [CHUNKS] if has_update or (goes_along and writer is None) else []
    return [*own, *([PERSONAL] if goes_along else []), *chunks, *([HEADER] if has_update else [])]


def _federation_in(header: Path) -> str | None:
    """Return the federation that an update was made for; None if there is no update."""
    try:
        return str(json.loads(header.read_text(encoding="utf-8"))["federation"])
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _move(name: str, home: Path, folder: Path) -> bool:
    """Move a file unless it is missing, or the federation's folder has a newer one.

    A device that went back to an earlier version for a while has files in both folders. An update's
    header only follows its chunks.
    """
    source, target = home / name, folder / name
    if not source.exists() or (name == HEADER and (home / CHUNKS).exists()):
        return False
    if target.exists() and target.stat().st_mtime_ns >= source.stat().st_mtime_ns:
        return False
    source.replace(target)
    return True
