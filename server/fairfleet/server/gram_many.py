"""The Gram engine's kernel for many rows that are there all at once: matrix products, twice as fast as dot products.

A matrix product sums an entry in an order of its own, so the last bits differ from those of rows that came one by
one. Whoever has all the rows gives them in the order of client ids, and gets the same bits every time.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fairfleet.server.blocks import Chunk, Matrix, Row, own_threads, pieces, spread, workspace
from fairfleet.server.gram_numpy import Laid, NumpyKernel, mirrored

MANY = 32  # rows: from here on, matrix products win
TILE = 24  # rows that are multiplied at a time with all the new ones
LENGTH = 8192  # columns of one product: a tile of them stays in the cache


def kernel_for(rows: int) -> NumpyKernel:
    """For so many rows that are here already."""
    return ManyRows() if rows >= MANY else NumpyKernel()


class ManyRows(NumpyKernel):
    def products(self, new: Sequence[Row], old: Sequence[Row], cuts: Sequence[Chunk]) -> list[Matrix]:
        tiles = [Laid(old[at : at + TILE]) for at in range(0, len(old), TILE)]
        with own_threads():
            return spread(lambda chunk: _chunk_products(tiles, Laid(new), len(old), chunk), cuts)


def _chunk_products(tiles: Sequence[Laid], new: Laid, old: int, chunk: Chunk) -> Matrix:
    lines, before = new.lines, TILE * len(tiles)
    space = workspace((lines + TILE) * LENGTH)
    total = np.zeros((lines, before + -(-lines // TILE) * TILE))
    for start, stop in pieces(chunk, LENGTH):
        rows, tile = np.split(space[: (lines + TILE) * (stop - start)].reshape(-1, stop - start), [lines])
        _cast(new, rows, start, stop)
        for at in range(0, lines, TILE):
            own = rows[at : at + TILE]
            tile[: len(own)], tile[len(own) :] = own, 0.0
            total[at:, before + at : before + at + TILE] += np.dot(rows[at:], tile.T)  # matmul keeps the lock
        for at, past in enumerate(tiles):
            _cast(past, tile, start, stop)
            total[:, at * TILE : (at + 1) * TILE] += np.dot(rows, tile.T)
    columns = np.r_[0:old, before : before + new.size]
    return mirrored(total[: new.size, columns])


def _cast(rows: Laid, room: Matrix, start: int, stop: int) -> None:
    for target, part in rows.into(room):
        np.copyto(target, part[:, start:stop])
    room[rows.size :] = 0.0
