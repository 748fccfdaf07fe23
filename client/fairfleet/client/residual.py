"""What a client's updates have lost to their codec so far, to be added to the next one: error feedback.

The loss of an update that is under way is *pending*. It becomes the residual by one rename, when the server's receipt
says that this very update counts: before that, and for ever if it does not count, the residual is what it was. So
nothing is lost and nothing is sent twice, wherever the client is killed. The files are not fsynced; a damaged one is
none.
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
_MAGIC = b"residual"


@dataclass(frozen=True)
class Kept:
    """A file of values, and behind them what they are."""

    whose: bytes
    round: int
    digest: bytes
    values: Vector | None  # none: the update lost nothing


class Residual:
    def __init__(self, folder: Path) -> None:
        self._file = folder / "residual"
        self._pending = folder / "residual.pending"

    def of(self, federation: str, signature: Signature, round: int) -> Vector | None:
        """What to add to the update of this round. None of another federation, or of one that began anew."""
        kept = _read(self._file)
        if kept is None or kept.values is None or kept.whose != _whose(federation, signature):
            return None
        if kept.round >= round:
            log.info("the residual is of round %d, this is round %d: begun anew", kept.round, round)
            return None
        return kept.values if len(kept.values) == signature.size(Section.PARAMETERS) else None

    @contextmanager
    def turn(self, federation: str, signature: Signature, round: int) -> Iterator[Turn]:
        """For the encoding of one update. What it loses is pending when this ends well, after `Turn.done`."""
        with open(os.open(self._pending, os.O_RDWR | os.O_CREAT, 0o600), "r+b", buffering=0) as file:
            turn = Turn(self.of(federation, signature, round), file)
            yield turn
            values = turn.checksum()
            write_all(file, _END.pack(_MAGIC, _whose(federation, signature), round, turn.digest, values))
            file.truncate()

    def pends(self, digest: bytes) -> bool:
        """Whether the loss of this update waits for its receipt."""
        kept = _read(self._pending, check=False)
        return kept is not None and kept.digest == digest

    def adopt(self, digest: bytes) -> None:
        """The update counts: what it lost is the residual from now on. Safe to repeat."""
        kept = _read(self._pending)
        if kept is not None and kept.digest == digest:
            os.replace(self._pending, self._file)


class Turn:
    """One update: takes the residual along, and writes down what is lost this time."""

    def __init__(self, before: Vector | None, file: BinaryIO) -> None:
        self.digest = b""  # of the update, when it is encoded
        self._before = before
        self._file = file
        self._hash = xxh3_128()
        self._lost = False

    def add_to(self, first: int, values: Vector) -> None:
        if self._before is not None:
            values += self._before[first : first + len(values)]

    def keep(self, lost: Vector) -> None:
        data = lost.astype("<f4", copy=False).view(np.uint8).data
        self._lost = self._lost or bool(lost.any())
        self._hash.update(data)
        write_all(self._file, data)

    def checksum(self) -> bytes:
        if self._lost:
            return self._hash.digest()
        self._file.seek(0)  # zeros only need not be kept
        return xxh3_128_digest(b"")


def _whose(federation: str, signature: Signature) -> bytes:
    return hashlib.sha256(f"{federation}\n{signature.to_json()}".encode()).digest()


def _read(path: Path, check: bool = True) -> Kept | None:
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
    if magic != _MAGIC or (check and xxh3_128_digest(values.data if values is not None else b"") != checksum):
        log.warning("%s is damaged: what earlier updates lost to their codec is forgotten", path)
        return None
    return Kept(whose, round, digest, values)
