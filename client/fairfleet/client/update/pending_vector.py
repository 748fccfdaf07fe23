"""Values that a client keeps on its disk from one update to the next.

The values of an update in progress are *pending*. One rename puts them in place when the server's
receipt says that exactly this update counts. Until then, and permanently if it does not count, the
earlier values stay. So nothing is lost and nothing is applied twice, wherever the client is
killed. The files are not fsynced; a damaged file is treated as missing.
"""

from __future__ import annotations

import hashlib
import logging
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
from xxhash import xxh3_128, xxh3_128_digest

from fairfleet.common.tensors import Section, Signature, Vector, write_all

log = logging.getLogger(__name__)

# Magic, owner, round, digest of the update, checksum of the values.
_END = struct.Struct("<8s32sQ32s16s")


@dataclass(frozen=True)
class StoredVector:
    """The values in a file, and the record behind them."""

    owner: bytes  # a hash of federation and model signature
    round: int
    digest: bytes  # of the update that the values belong to
    values: Vector | None  # None means only zeros


class VectorWriter:
    """Writes the values of the update in progress, part by part."""

    def __init__(self, file: BinaryIO) -> None:
        self.digest = b""  # of the update; set once it is encoded
        self._file = file
        self._hash = xxh3_128()
        self._any = False

    def add(self, values: Vector) -> None:
        """Append one part."""
        data = values.astype("<f4", copy=False).view(np.uint8).data
        self._any = self._any or bool(values.any())
        self._hash.update(data)
        write_all(self._file, data)

    def finish(self) -> bytes:
        """Return the checksum of all values. If they are only zeros, none are stored."""
        if self._any:
            return self._hash.digest()
        self._file.seek(0)
        return xxh3_128_digest(b"")


class PendingVector:
    """A vector in a file, and its pending successor in another one."""

    def __init__(self, folder: Path, name: str) -> None:
        """Use the file `name` in the folder; the name has at most 8 letters."""
        self._file = folder / name
        self._pending = folder / f"{name}.pending"
        self._magic = name.encode().ljust(8)

    def load(self, federation: str, signature: Signature) -> StoredVector | None:
        """Return the stored vector, or None if it is of another federation or another model."""
        stored = self._read(self._file)
        if stored is None or stored.owner != owner_of(federation, signature):
            return None
        size = signature.size(Section.PARAMETERS)
        return stored if stored.values is None or len(stored.values) == size else None

    @contextmanager
    def write_pending(
        self, federation: str, signature: Signature, round_number: int
    ) -> Iterator[VectorWriter]:
        """Provide a writer; what it wrote is pending when the block ends without an error.

        The block must set the writer's `digest`.
        """
        with open(
            os.open(self._pending, os.O_RDWR | os.O_CREAT, 0o600), "r+b", buffering=0
        ) as file:
            writer = VectorWriter(file)
            yield writer
            checksum, owner = writer.finish(), owner_of(federation, signature)
            record = _END.pack(self._magic, owner, round_number, writer.digest, checksum)
            write_all(file, record)
            file.truncate()

    def is_pending(self, digest: bytes) -> bool:
        """Return whether the values of this update wait for its receipt."""
        stored = self._read(self._pending, check=False)
        return stored is not None and stored.digest == digest

    def adopt(self, digest: bytes) -> None:
        """Put the pending values in place if they are of this update, which counts.

        Safe to repeat.
        """
        stored = self._read(self._pending)
        if stored is not None and stored.digest == digest:
            # Not `write_atomically`: the file was written long ago, and waited for this receipt.
            os.replace(self._pending, self._file)

    def delete(self) -> None:
        """Delete the values, and pending ones."""
        for file in (self._file, self._pending):
            file.unlink(missing_ok=True)

    def _read(self, path: Path, check: bool = True) -> StoredVector | None:
        """Return a file's contents, or None if it is missing or damaged.

        The values stay on the disk; they are mapped into memory.
        """
        try:
            size = path.stat().st_size - _END.size
            if size < 0 or size % 4:
                return None
            with open(path, "rb") as file:
                file.seek(size)
                magic, owner, round_number, digest, checksum = _END.unpack(file.read(_END.size))
            values = np.memmap(path, "<f4", "r", shape=(size // 4,)) if size else None
        except (OSError, struct.error):
            return None
        if magic != self._magic or (check and _checksum(values) != checksum):
            log.warning("%s is damaged: the values of earlier updates in it are lost", path)
            return None
        return StoredVector(owner, round_number, digest, values)


def _checksum(values: Vector | None) -> bytes:
    return xxh3_128_digest(values.data if values is not None else b"")


def owner_in(path: Path) -> bytes | None:
    """Return the owner that the record in a file names; None if it cannot be read."""
    try:
        with open(path, "rb") as file:
            file.seek(-_END.size, os.SEEK_END)
            magic, owner, *_ = _END.unpack(file.read(_END.size))
    except (OSError, struct.error):
        return None
    name = path.name.partition(".")[0]
    return bytes(owner) if magic == name.encode().ljust(8) else None


def owner_of(federation: str, signature: Signature) -> bytes:
    """Return the hash that stands for a federation and the signature of its model."""
    return hashlib.sha256(f"{federation}\n{signature.to_json()}".encode()).digest()
