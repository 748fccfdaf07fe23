"""The Gram engine's kernel on numpy: casts, dot products and sums of blocks, on all cores.

Time is spent on reading rows from memory and on Python code between two calls. (numpy's vecdot
and matmul, for example, keep the interpreter's lock.) Calls are therefore long, and rows that lie
evenly spaced in one matrix are cast together. Both passes are fastest if a round's rows are in
one matrix, in the order of client ids; rows elsewhere give the same inner products.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import groupby, takewhile
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from fairfleet.server.gram.blocks import (
    SEGMENT,
    Chunk,
    ColumnRule,
    Matrix,
    Row,
    map_chunks,
    pieces,
    single_threaded_blas,
    squared_length,
    workspace,
)

TILE = 12  # rows of a segment that stay in the cache while others pass by
# BLAS multiplies this many rows at once. In a multiple of it, no row is treated differently.
EVEN = 4
BLOCK = 1 << 23  # numbers that BLAS combines in one call: each call waits for its slowest thread
# Columns that are summed row by row at a time; needs no more scratch memory than the products.
WIDE = 4 * SEGMENT
COLUMNS = 1 << 15  # numbers that a column rule sees in one call

Copies = list[tuple[Matrix, Row]]
# Some lines, one line, and per segment the place where their products are written.
Product = tuple[Matrix, Matrix, list[Matrix]]


class NumpyKernel:
    """Rows in main memory. Rows that are evenly spaced in one matrix are read faster."""

    squares_alone: ClassVar[bool] = True

    def hold(self, row: Row) -> Row:
        """Return the row itself: this kernel makes no copy."""
        return row

    def products(
        self, new: Sequence[Row], old: Sequence[Row], cuts: Sequence[Chunk]
    ) -> list[Matrix]:
        """Return the inner products inside each chunk, of shape (new, old + new)."""
        # The last few old rows are laid out with the new ones: this makes calls fewer and longer.
        tiled = len(old) - len(old) % TILE
        tiles = [RowLayout(old[start : start + TILE]) for start in range(0, tiled, TILE)]
        last = RowLayout([*old[tiled:], *new])
        with single_threaded_blas():
            return map_chunks(lambda chunk: _chunk_products(tiles, last, len(new), chunk), cuts)

    def squares(self, new: Sequence[Row], cuts: Sequence[Chunk]) -> list[Matrix]:
        """Return, inside each chunk, the inner product of each new row with itself."""
        layout = RowLayout(new)
        with single_threaded_blas():
            return map_chunks(lambda chunk: _chunk_squares(layout, chunk), cuts)

    def combine(
        self,
        rows: Sequence[Row],
        coefficients: Matrix,
        wide: NDArray[np.bool_],
        cuts: Sequence[Chunk],
        out: Row,
    ) -> Matrix:
        """Fill `out` with the combination; return the squared length per line of coefficients.

        Layers marked in `wide`, and all layers of a float64 result, are summed in float64.
        """
        exact = wide | (out.dtype == np.float64)
        exact_cuts = [chunk for chunk in cuts if exact[chunk.layer]]
        narrow_cuts = [chunk for chunk in cuts if not exact[chunk.layer]]
        squares = np.zeros(len(coefficients))
        parts = map_chunks(
            lambda chunk: _sum_in_float64(rows, coefficients[chunk.layer], chunk, out), exact_cuts
        )
        for chunk, part in zip(exact_cuts, parts, strict=True):
            squares[chunk.layer] += part
        _combine_in_float32(rows, coefficients, narrow_cuts, out, squares)
        return squares

    def columns(
        self, rows: Sequence[Row], reduce: ColumnRule, cuts: Sequence[Chunk], out: Row
    ) -> None:
        """Fill `out` with one number per column, computed by `reduce` from the rows' entries."""
        width = max(COLUMNS // len(rows), 1)

        def reduce_chunk(chunk: Chunk) -> None:
            for start in range(chunk.start, chunk.stop, width):
                stop = min(start + width, chunk.stop)
                out[start:stop] = reduce(np.stack([row[start:stop] for row in rows]))

        map_chunks(reduce_chunk, cuts)


class RowLayout:
    """Rows as a few two-dimensional views, so that one call casts many of them."""

    def __init__(self, rows: Sequence[Row]) -> None:
        """Group the rows; `size` is their number, `lines` the next multiple of EVEN."""
        self.size = len(rows)
        self.lines = _even(len(rows))
        self._parts: list[tuple[int, Row]] = []
        first = 0
        for run in _even_runs(rows):
            self._parts.append((first, run))
            first += len(run)

    def area(self, space: Matrix, length: int) -> Matrix:
        """Return the part of `space` for `length` columns of these rows, of shape (lines, length).

        The rows are cast to float64 there; the lines after the last row are padding.
        """
        return space[: self.lines * length].reshape(self.lines, length)

    def copies_into(self, area: Matrix) -> Copies:
        """Return (target, source) pairs to copy, still without the choice of columns."""
        return [(area[first : first + len(part)], part) for first, part in self._parts]


def mirrored(total: Matrix) -> Matrix:
    """Fill in the products of pairs of new rows, which were computed only below the diagonal."""
    old = total.shape[1] - len(total)
    own = np.tril(total[:, old:])
    return np.hstack([total[:, :old], own + np.tril(own, -1).T])


def _blas_takes(matrix: Row) -> bool:
    """Return whether BLAS can read the matrix as it lies in memory, without a copy."""
    return (
        matrix.strides[0] >= matrix.strides[1] * matrix.shape[1]
        and matrix.strides[1] == matrix.itemsize
    )


def _even(rows: int) -> int:
    return -(-rows // EVEN) * EVEN


def _even_runs(rows: Sequence[Row]) -> Iterator[Row]:
    """Yield the rows as arrays of rows, without a copy.

    There is one array for each run of evenly spaced rows of one matrix.
    """
    while rows:
        first, addresses = rows[0], [row.__array_interface__["data"][0] for row in rows]
        step = addresses[1] - addresses[0] if len(rows) > 1 else first.nbytes
        alike = (_share_a_matrix(first, row) for row in rows)
        even = (address == addresses[0] + index * step for index, address in enumerate(addresses))
        count = sum(1 for _ in takewhile(all, zip(alike, even, strict=True)))
        shape, strides = (count, len(first)), (step if count > 1 else first.nbytes, *first.strides)
        yield np.lib.stride_tricks.as_strided(first, shape, strides, writeable=False)
        rows = rows[count:]


def _share_a_matrix(first: Row, row: Row) -> bool:
    """Return whether both are views of one array with the same layout.

    Separate arrays may be anywhere in memory, so no step between them can be trusted.
    """
    return row is first or (
        row.base is first.base is not None
        and row.dtype == first.dtype
        and row.strides == first.strides
    )


def _chunk_products(tiles: Sequence[RowLayout], last: RowLayout, new: int, chunk: Chunk) -> Matrix:
    """Return the products of the last layout's `new` final rows with every row."""
    widest = min(SEGMENT, chunk.stop - chunk.start)
    space = workspace((last.lines + (TILE if tiles else 0)) * widest)
    cuts = list(pieces(chunk, SEGMENT))
    dots = np.zeros((len(cuts), new, TILE * len(tiles) + last.lines))
    for length, indices in groupby(range(len(cuts)), lambda k: cuts[k][1] - cuts[k][0]):
        work = list(_plan(tiles, last, new, space, length, dots))
        for index in indices:
            start, stop = cuts[index]
            for copies, products in work:
                for target, rows in copies:
                    np.copyto(target, rows[:, start:stop])
                for tile, row, out in products:
                    np.dot(tile, row, out=out[index])
    return mirrored(_sum_in_order(dots)[:, : TILE * len(tiles) + last.size])


def _chunk_squares(rows: RowLayout, chunk: Chunk) -> Matrix:
    """Return each row times itself, with the bits that `_chunk_products` gives.

    Each is therefore computed among EVEN lines, segment by segment.
    """
    space, total = workspace(rows.lines * SEGMENT), np.zeros(rows.size)
    for start, stop in pieces(chunk, SEGMENT):
        lines = rows.area(space, stop - start)
        lines[rows.size :] = 0.0
        for target, part in rows.copies_into(lines):
            np.copyto(target, part[:, start:stop])
        for k in range(rows.size):
            first = k - k % EVEN
            total[k] += np.dot(lines[first : first + EVEN], lines[k])[k - first]
    return total


def _plan(
    tiles: Sequence[RowLayout], last: RowLayout, new: int, space: Matrix, length: int, dots: Matrix
) -> Iterator[tuple[Copies, list[Product]]]:
    """Yield what is copied and multiplied in each segment of this length.

    It is prepared once, because Python code between two calls would hold up all threads. A matrix
    times a vector is one dot product per row, with the same order of terms in each as long as the
    number of rows is a multiple of EVEN. A matrix times a matrix would be faster for many new
    rows, but there the last bits of an entry depend on its position.
    """
    lines = last.area(space, length)
    lines[last.size :] = 0.0
    old, before = last.size - new, TILE * len(tiles)

    def product(tile: Matrix, k: int, column: int) -> Product:
        """Multiply the tile, which starts at this column, by new row k."""
        return tile, lines[old + k], list(dots[:, k, column : column + len(tile)])

    own = [
        # Later new rows compute their products with row k themselves.
        product(lines[first : min(first + TILE, _even(old + k + 1))], k, before + first)
        for k in range(new)
        for first in range(0, old + k + 1, TILE)
    ]
    yield last.copies_into(lines), own
    side = space[-TILE * length :].reshape(TILE, length) if tiles else space
    for index, tile in enumerate(tiles):
        yield tile.copies_into(side), [product(side, k, index * TILE) for k in range(new)]


def _sum_in_order(dots: Matrix) -> Matrix:
    # numpy's own sum groups the terms by how many there are.
    total = np.zeros(dots.shape[1:])
    for part in dots:
        total += part
    return total


def _sum_in_float64(rows: Sequence[Row], coefficients: Matrix, chunk: Chunk, out: Row) -> float:
    """Write the weighted sum, added row by row in float64; return its squared length."""
    length = 0.0
    for start, stop in pieces(chunk, WIDE):
        total, spare = workspace(2 * (stop - start)).reshape(2, -1)
        total.fill(0.0)
        with np.errstate(all="ignore"):  # the engine finds values that do not fit
            for row, coefficient in zip(rows, coefficients.tolist(), strict=True):
                np.copyto(spare, row[start:stop])  # far faster than a product of mixed types
                np.multiply(spare, coefficient, out=spare)
                np.add(total, spare, out=total)
            np.copyto(out[start:stop], total, casting="same_kind")
            length += squared_length(out[start:stop])
    return length


def _combine_in_float32(
    rows: Sequence[Row], coefficients: Matrix, cuts: Sequence[Chunk], out: Row, squares: Matrix
) -> None:
    """Write the layers of these chunks to `out`, and their squared lengths to `squares`."""
    matrix = next(_even_runs(rows))
    is_one_matrix = len(matrix) == len(rows) and matrix.dtype == np.float32 and _blas_takes(matrix)
    for layer, inside in groupby(cuts, lambda chunk: chunk.layer):
        start, *_, stop = (edge for chunk in inside for edge in (chunk.start, chunk.stop))
        narrow, columns = coefficients[layer].astype(np.float32), Chunk(layer, start, stop)
        if is_one_matrix:
            squares[layer] = _weighted_sum(matrix, narrow, columns, out)
        else:
            squares[layer] = _sum_row_by_row(rows, narrow, columns, out)


def _weighted_sum(matrix: Row, coefficients: Row, chunk: Chunk, out: Row) -> float:
    """Write the weighted sum in float32, with BLAS's own threads; return its squared length."""
    width = max(BLOCK // len(matrix) // SEGMENT, 1) * SEGMENT
    length = 0.0
    with np.errstate(all="ignore"):  # the engine repeats in float64 what overflows
        for start, stop in pieces(chunk, width):
            block = np.matmul(coefficients, matrix[:, start:stop], out=out[start:stop])
            length += _squared_length_by_blas(block)  # while it is in the cache
    return length


def _squared_length_by_blas(block: Row) -> float:
    """Return what `squared_length` does, using BLAS's own threads."""
    square = float(np.dot(block, block))
    return square if math.isfinite(square) else squared_length(block)


def _sum_row_by_row(rows: Sequence[Row], coefficients: Row, chunk: Chunk, out: Row) -> float:
    """Do what `_weighted_sum` does for rows that are not one matrix.

    This is cheaper than copying them into one.
    """

    def sum_part(part: Chunk) -> float:
        total = out[part.start : part.stop]
        term = workspace(WIDE).view(np.float32)[: len(total)]
        with np.errstate(all="ignore"):  # the setting belongs to the thread
            np.multiply(rows[0][part.start : part.stop], coefficients[0], out=total)
            for row, coefficient in zip(rows[1:], coefficients[1:], strict=True):
                np.multiply(row[part.start : part.stop], coefficient, out=term)
                np.add(total, term, out=total)
            return squared_length(total)

    parts = [Chunk(chunk.layer, start, stop) for start, stop in pieces(chunk, WIDE)]
    return sum(map_chunks(sum_part, parts))
