"""Where a simulation keeps the history's rows: in memory while they fit, else in one sparse file.

The file is mapped; after a row is written its pages are given back, so that thousands of rows take disk, not memory.
Unlike the server's folder it need not survive a crash, and nothing is synced.
"""

from __future__ import annotations

import mmap
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import IO

import numpy as np

from fairfleet.server.blocks import Row
from fairfleet.server.history import Memory, Shelf
from fairfleet.server.rules.base import PastRow

IN_MEMORY_BYTES = 1 << 30


def shelf_for(clients: int, size: int, folder: Path | None) -> Shelf:
    if 4 * clients * size <= IN_MEMORY_BYTES:
        return Memory()
    with tempfile.TemporaryFile(dir=folder) as file:  # nameless: it is gone with the last use of its mapping
        return MappedFile(file, clients, size)


class MappedFile:
    """One place per client, written over by its next row."""

    def __init__(self, file: IO[bytes], clients: int, size: int) -> None:
        page = mmap.PAGESIZE // 4
        stride = -(-size // page) * page  # every row begins on a page of its own
        file.truncate(4 * clients * stride)
        self._map = mmap.mmap(file.fileno(), 0)
        self._rows = np.frombuffer(self._map, np.float32).reshape(clients, stride)[:, :size]
        self._places: dict[str, int] = {}

    def put(self, past: PastRow, row: Row) -> Row:
        place: Row = self._rows[self._places.setdefault(past.client, len(self._places))]
        place[:] = row
        self._map.madvise(mmap.MADV_DONTNEED)  # what is in the file stays there; only our memory is given back
        return place

    def drop(self, past: PastRow) -> None:
        pass  # written over already

    def stored(self) -> Iterable[tuple[PastRow, Row]]:
        return ()
