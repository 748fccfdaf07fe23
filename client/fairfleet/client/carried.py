"""Values that a client carries from one update to the next, on its disk.

Those of an update that is under way are *pending*. They take their place by one rename, when the server's receipt says
that this very update counts: before that, and for ever if it does not count, what is carried is what it was. So nothing
is lost and nothing happens twice, wherever the client is killed. The files are not fsynced; a damaged one is none.
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

_END = struct.Struct("<8s32sQ32s16s")  # magic, whose, round, digest of the update, checksum of the values


@dataclass(frozen=True)
class Kept:
    """A file of values, and behind them what they are."""

    whose: bytes
    round: int
    digest: bytes
    values: Vector | None  # none: only zeros


class Writing:
    """The values of the update under way, one part after the other."""

    def __init__(self, file: BinaryIO) -> None:
        self.digest = b""  # of the update, when it is encoded
        self._file = file
        self._hash = xxh3_128()
        self._any = False

    def add(self, values: Vector) -> None:
        data = values.astype("<f4", copy=False).view(np.uint8).data
        self._any = self._any or bool(values.any())
        self._hash.update(data)
        write_all(self._file, data)

    def checksum(self) -> bytes:
        if self._any:
            return self._hash.digest()
        self._file.seek(0)  # zeros only need not be kept
        return xxh3_128_digest(b"")


class Carried:
    def __init__(self, folder: Path, name: str) -> None:
        """The name is that of the file; it has at most 8 letters."""
        self._file = folder / name
        self._pending = folder / f"{name}.pending"
        self._magic = name.encode().ljust(8)

    def kept(self, federation: str, signature: Signature) -> Kept | None:
        """None of another federation, or of another model."""
        found = self._read(self._file)
        if found is None or found.whose != _whose(federation, signature):
            return None
        whole = found.values is None or len(found.values) == signature.size(Section.PARAMETERS)
        return found if whole else None

    @contextmanager
    def writing(self, federation: str, signature: Signature, round: int) -> Iterator[Writing]:
        """What is written is pending when this ends well, after its `digest` was set."""
        with open(os.open(self._pending, os.O_RDWR | os.O_CREAT, 0o600), "r+b", buffering=0) as file:
            writing = Writing(file)
            yield writing
            values = writing.checksum()
            write_all(file, _END.pack(self._magic, _whose(federation, signature), round, writing.digest, values))
            file.truncate()

    def pends(self, digest: bytes) -> bool:
        """Whether the values of this update wait for its receipt."""
        kept = self._read(self._pending, check=False)
        return kept is not None and kept.digest == digest

    def adopt(self, digest: bytes) -> None:
        """The update counts: its values are carried from now on. Safe to repeat."""
        kept = self._read(self._pending)
        if kept is not None and kept.digest == digest:
            os.replace(self._pending, self._file)

    def _read(self, path: Path, check: bool = True) -> Kept | None:
        """The values stay on the disk, mapped. None where there is no such file or it is damaged."""
        try:
            size = path.stat().st_size - _END.size
            if size < 0 or size % 4:
                return None
            with open(path, "rb") as file:
                file.seek(size)
                magic, whose, round, digest, checksum = _END.unpack(file.read(_END.size))
            values = np.memmap(path, "<f4", "r", shape=(size // 4,)) if size else None
        except (OSError, struct.error):
            return None
        if magic != self._magic or (check and xxh3_128_digest(values.data if values is not None else b"") != checksum):
            log.warning("%s is damaged: what it held of earlier updates is forgotten", path)
            return None
        return Kept(whose, round, digest, values)


def _whose(federation: str, signature: Signature) -> bytes:
    return hashlib.sha256(f"{federation}\n{signature.to_json()}".encode()).digest()
