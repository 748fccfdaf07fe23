"""The Gram engine's kernel on numpy: casts, dot products and sums of blocks, on all cores.

What costs time is reading rows from memory and Python between two calls (numpy's vecdot and matmul, for one, keep
the interpreter's lock), so calls are long and rows that lie evenly in one matrix are cast together. Keep a round's
rows in one matrix, in the order of client ids, and both passes are at their fastest; rows elsewhere give the same
inner products.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby, takewhile

import numpy as np
from numpy.typing import NDArray

from fairfleet.server.blocks import (
    SEGMENT,
    Chunk,
    ColumnRule,
    Matrix,
    Row,
    own_threads,
    pieces,
    spread,
    workspace,
)

TILE = 12  # rows of a segment that stay in the cache while others pass by
EVEN = 4  # BLAS takes so many rows at once: with a multiple of it, none is treated differently
BLOCK = 1 << 23  # numbers that BLAS combines in one call: each call waits for its slowest thread
WIDE = 4 * SEGMENT  # columns that are summed row by row at a time: scratch memory no larger than for products
COLUMNS = 1 << 15  # numbers that a column rule sees in one call


class NumpyKernel:
    """Rows in the memory of the machine. Those that lie evenly in one matrix are read faster."""

    def hold(self, row: Row) -> Row:
        return row

    def products(self, new: Sequence[Row], old: Sequence[Row], cuts: Sequence[Chunk]) -> list[Matrix]:
        near = len(old) - len(old) % TILE  # the last few old rows go with the new ones: fewer, longer calls
        tiles = [Laid(old[at : at + TILE]) for at in range(0, near, TILE)]
        last = Laid([*old[near:], *new])
        with own_threads():
            return spread(lambda chunk: _chunk_products(tiles, last, len(new), chunk), cuts)

    def combine(
        self, rows: Sequence[Row], coefficients: Matrix, wide: NDArray[np.bool_], cuts: Sequence[Chunk], out: Row
    ) -> None:
        exact = wide | (out.dtype == np.float64)
        spread(
            lambda chunk: _add_up(rows, coefficients[chunk.layer], chunk, out),
            [chunk for chunk in cuts if exact[chunk.layer]],
        )
        matrix = next(_even_runs(rows))
        whole = len(matrix) == len(rows) and matrix.dtype == np.float32 and _blas_takes(matrix)
        for layer, inside in groupby(cuts, lambda chunk: chunk.layer):
            start, *_, stop = (edge for chunk in inside for edge in (chunk.start, chunk.stop))
            if exact[layer]:
                continue
            narrow = coefficients[layer].astype(np.float32)
            if whole:
                _weighted_sum(matrix, narrow, Chunk(layer, start, stop), out)
            else:
                _sum_row_by_row(rows, narrow, Chunk(layer, start, stop), out)

    def columns(self, rows: Sequence[Row], reduce: ColumnRule, cuts: Sequence[Chunk], out: Row) -> None:
        width = max(COLUMNS // len(rows), 1)

        def work(chunk: Chunk) -> None:
            for start in range(chunk.start, chunk.stop, width):
                stop = min(start + width, chunk.stop)
                out[start:stop] = reduce(np.stack([row[start:stop] for row in rows]))

        spread(work, cuts)


def _blas_takes(matrix: Row) -> bool:
    """As it lies, without a copy."""
    return matrix.strides[0] >= matrix.strides[1] * matrix.shape[1] and matrix.strides[1] == matrix.itemsize


class Laid:
    """Rows as few two-dimensional views, so that one call casts many of them."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.size = len(rows)
        self.lines = _even(len(rows))
        self._parts: list[tuple[int, Row]] = []
        at = 0
        for run in _even_runs(rows):
            self._parts.append((at, run))
            at += len(run)

    def room(self, space: Matrix, length: int) -> Matrix:
        """Where so many columns of these rows are laid out in float64, padded to an even number of lines."""
        return space[: self.lines * length].reshape(self.lines, length)

    def into(self, room: Matrix) -> list[tuple[Matrix, Row]]:
        """What is to be copied where, but for the choice of columns."""
        return [(room[at : at + len(part)], part) for at, part in self._parts]


def _even_runs(rows: Sequence[Row]) -> Iterator[Row]:
    """The rows as arrays of rows, without copying: one for each run of evenly spaced rows of one matrix."""
    while rows:
        first, places = rows[0], [row.__array_interface__["data"][0] for row in rows]
        step = places[1] - places[0] if len(rows) > 1 else first.nbytes
        alike = (
            row is first  # arrays of their own may be anywhere: no step between them can be trusted
            or (row.base is first.base is not None and row.dtype == first.dtype and row.strides == first.strides)
            for row in rows
        )
        even = (place == places[0] + at * step for at, place in enumerate(places))
        count = sum(1 for _ in takewhile(all, zip(alike, even, strict=True)))
        shape, strides = (count, len(first)), (step if count > 1 else first.nbytes, *first.strides)
        yield np.lib.stride_tricks.as_strided(first, shape, strides, writeable=False)
        rows = rows[count:]


def _chunk_products(tiles: Sequence[Laid], last: Laid, new: int, chunk: Chunk) -> Matrix:
    """The products of the last tile's new rows with every row of the tiles."""
    space = workspace((last.lines + (TILE if tiles else 0)) * SEGMENT)
    cuts = list(pieces(chunk, SEGMENT))
    dots = np.zeros((len(cuts), new, TILE * len(tiles) + last.lines))
    for length, some in groupby(range(len(cuts)), lambda at: cuts[at][1] - cuts[at][0]):
        work = list(_plan(tiles, last, new, space, length, dots))
        for at in some:
            start, stop = cuts[at]
            for copies, products in work:
                for room, rows in copies:
                    np.copyto(room, rows[:, start:stop])
                for tile, row, out in products:
                    np.dot(tile, row, out=out[at])
    return mirrored(_sum_in_order(dots)[:, : TILE * len(tiles) + last.size])


Copies = list[tuple[Matrix, Row]]
Product = tuple[Matrix, Matrix, list[Matrix]]  # lines, a line, and per segment where their products go


def _plan(
    tiles: Sequence[Laid], last: Laid, new: int, space: Matrix, length: int, dots: Matrix
) -> Iterator[tuple[Copies, list[Product]]]:
    """What is done in each segment of this length: prepared once, since Python would hold up both threads.

    A matrix times a vector is one dot product per row, in the same order of terms for each as long as the rows are
    a multiple of EVEN. A matrix times a matrix would be faster for many new rows, but there the last bits of an
    entry depend on its place.
    """
    lines = last.room(space, length)
    lines[last.size :] = 0.0
    old, before = last.size - new, TILE * len(tiles)

    def product(tile: Matrix, k: int, at: int) -> Product:
        """The tile, which starts at column `at`, times a new row."""
        return tile, lines[old + k], list(dots[:, k, at : at + len(tile)])

    own = [
        product(lines[at : min(at + TILE, _even(old + k + 1))], k, before + at)  # later rows have their own turn
        for k in range(new)
        for at in range(0, old + k + 1, TILE)
    ]
    yield last.into(lines), own
    side = space[-TILE * length :].reshape(TILE, length) if tiles else space
    for place, tile in enumerate(tiles):
        yield tile.into(side), [product(side, k, place * TILE) for k in range(new)]


def _even(rows: int) -> int:
    return -(-rows // EVEN) * EVEN


def mirrored(total: Matrix) -> Matrix:
    """Pairs of new rows were computed one way only."""
    old = total.shape[1] - len(total)
    own = np.tril(total[:, old:])
    return np.hstack([total[:, :old], own + np.tril(own, -1).T])


def _sum_in_order(dots: Matrix) -> Matrix:
    # numpy's own sum groups the terms by how many there are
    total = np.zeros(dots.shape[1:])
    for part in dots:
        total += part
    return total


def _add_up(rows: Sequence[Row], coefficients: Matrix, chunk: Chunk, out: Row) -> None:
    """A weighted sum in float64, row by row in the order given."""
    for start, stop in pieces(chunk, WIDE):
        total, spare = workspace(2 * (stop - start)).reshape(2, -1)
        total.fill(0.0)
        for row, coefficient in zip(rows, coefficients.tolist(), strict=True):
            np.copyto(spare, row[start:stop])  # far faster than a product of mixed types
            np.multiply(spare, coefficient, out=spare)
            np.add(total, spare, out=total)
        np.copyto(out[start:stop], total, casting="same_kind")


def _weighted_sum(matrix: Row, coefficients: Row, chunk: Chunk, out: Row) -> None:
    """A weighted sum in float32. BLAS brings its own threads."""
    width = max(BLOCK // len(matrix) // SEGMENT, 1) * SEGMENT
    for start, stop in pieces(chunk, width):
        np.matmul(coefficients, matrix[:, start:stop], out=out[start:stop])


def _sum_row_by_row(rows: Sequence[Row], coefficients: Row, chunk: Chunk, out: Row) -> None:
    """The same for rows that are not one matrix: cheaper than to make them one."""

    def work(part: Chunk) -> None:
        total = out[part.start : part.stop]
        term = workspace(WIDE).view(np.float32)[: len(total)]
        np.multiply(rows[0][part.start : part.stop], coefficients[0], out=total)
        for row, coefficient in zip(rows[1:], coefficients[1:], strict=True):
            np.multiply(row[part.start : part.stop], coefficient, out=term)
            np.add(total, term, out=total)

    spread(work, [Chunk(chunk.layer, start, stop) for start, stop in pieces(chunk, WIDE)])
