"""The Gram engine's kernel for many rows that are available at once.

It uses matrix products, which are twice as fast as dot products. A matrix product sums each entry
in an order of its own, so the last bits differ from those of rows that were added one by one. A
caller that has all the rows passes them in the order of client ids and gets the same bits every
time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from fairfleet.server.gram.blocks import (
    Chunk,
    Matrix,
    Row,
    map_chunks,
    pieces,
    single_threaded_blas,
    workspace,
)
from fairfleet.server.gram.numpy_kernel import NumpyKernel, RowLayout, mirrored

MANY_ROWS = 32  # from this number of rows on, matrix products are faster
TILE = 24  # rows that are multiplied at a time with all the new ones
LENGTH = 8192  # columns of one product: a tile of them stays in the cache


def kernel_for(rows: int) -> NumpyKernel:
    """Return the faster kernel for `rows` rows that are available at once."""
    return MatmulKernel() if rows >= MANY_ROWS else NumpyKernel()


class MatmulKernel(NumpyKernel):
    """Rows in main memory, multiplied as matrices."""

    # The last bits of an entry depend on its position in the product.
    squares_alone: ClassVar[bool] = False

    def products(
        self, new: Sequence[Row], old: Sequence[Row], cuts: Sequence[Chunk]
    ) -> list[Matrix]:
        """Return the inner products inside each chunk, of shape (new, old + new)."""
        tiles = [RowLayout(old[start : start + TILE]) for start in range(0, len(old), TILE)]
        with single_threaded_blas():
            return map_chunks(
                lambda chunk: _chunk_products(tiles, RowLayout(new), len(old), chunk), cuts
            )


def _chunk_products(tiles: Sequence[RowLayout], new: RowLayout, old: int, chunk: Chunk) -> Matrix:
    lines, before = new.lines, TILE * len(tiles)
    space = workspace((lines + TILE) * LENGTH)
    total = np.zeros((lines, before + -(-lines // TILE) * TILE))
    for start, stop in pieces(chunk, LENGTH):
        rows, tile = np.split(
            space[: (lines + TILE) * (stop - start)].reshape(-1, stop - start), [lines]
        )
        _cast(new, rows, start, stop)
        # np.dot is used because np.matmul keeps the interpreter's lock.
        for first in range(0, lines, TILE):
            own = rows[first : first + TILE]
            tile[: len(own)], tile[len(own) :] = own, 0.0
            column = before + first
            total[first:, column : column + TILE] += np.dot(rows[first:], tile.T)
        for index, old_rows in enumerate(tiles):
            _cast(old_rows, tile, start, stop)
            total[:, index * TILE : (index + 1) * TILE] += np.dot(rows, tile.T)
    columns = np.r_[0:old, before : before + new.size]
    return mirrored(total[: new.size, columns])


def _cast(rows: RowLayout, room: Matrix, start: int, stop: int) -> None:
    for target, part in rows.copies_into(room):
        np.copyto(target, part[:, start:stop])
    room[rows.size :] = 0.0
