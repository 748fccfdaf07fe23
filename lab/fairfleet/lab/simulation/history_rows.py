"""The history's rows in a simulation: in memory while they fit, otherwise in one sparse file.

The file is mapped, and after a row is written its pages are freed, so that thousands of rows take
disk space instead of memory. Unlike the server's folder it need not survive a crash, so nothing
is synced.
"""

from __future__ import annotations

import mmap
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import IO

import numpy as np

from fairfleet.server.aggregation.half_rows import ScaledRow
from fairfleet.server.aggregation.history import InMemoryRows, RowStore
from fairfleet.server.gram.blocks import Row
from fairfleet.server.rules import PastRow

IN_MEMORY_BYTES = 1 << 30


def row_store_for(clients: int, size: int, folder: Path | None) -> RowStore:
    """Return a store for one row of `size` values per client; `folder` is for its file, if any."""
    if 4 * clients * size <= IN_MEMORY_BYTES:
        return InMemoryRows()
    # The file has no name: the system removes it when its mapping is no longer used.
    with tempfile.TemporaryFile(dir=folder) as file:
        return MappedFile(file, clients, size)


class MappedFile:
    """A mapped file with one float32 row per client, which the client's next row replaces.

    Values in float32 need no scale, so the exponent of a row is always 0.
    """

    def __init__(self, file: IO[bytes], clients: int, size: int) -> None:
        page = mmap.PAGESIZE // 4
        stride = -(-size // page) * page  # Every row begins on a page of its own.
        file.truncate(4 * clients * stride)
        self._map = mmap.mmap(file.fileno(), 0)
        self._rows = np.frombuffer(self._map, np.float32).reshape(clients, stride)[:, :size]
        self._indices: dict[str, int] = {}  # of rows, by client

    def put(self, past: PastRow, row: Row, exponent: int = 0) -> Row:
        """Store the newest row of a client, and return it as it is stored."""
        stored: Row = self._rows[self._indices.setdefault(past.client, len(self._indices))]
        stored[:] = row
        # This frees our memory only; the values stay in the file.
        self._map.madvise(mmap.MADV_DONTNEED)
        return stored

    def drop(self, past: PastRow) -> None:
        """Do nothing: the client's next row replaces this one."""

    def stored(self) -> Iterable[tuple[PastRow, ScaledRow]]:
        """Return nothing: the file is new and has no rows of an earlier run."""
        return ()
