"""The Gram engine: the only code that reads d-dimensional rows, and it reads each of them twice.

Rows come in one by one (their inner products with the rows already there are computed at once) and go out as one
combination. An inner product is always the same sum of float64 dot products over the same short segments, whoever
came first, however many came together and on however many threads: arrival order cannot change a bit of it.
The rows belong to the caller; nothing here copies one or keeps more than a few blocks beside them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, groupby, islice, takewhile
from threading import Lock
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from fairfleet.server.blocks import SEGMENT, Chunk, chunks, own_threads, segments, spread, workspace

Row = NDArray[np.floating[Any]]
Matrix = NDArray[np.float64]
T = TypeVar("T")

BATCH = 64  # new rows that are multiplied together: each old row is then read once per batch
TILE = 12  # rows of a segment that stay in the cache while others pass by
EVEN = 4  # BLAS takes so many rows at once: with a multiple of it, none is treated differently
BLOCK = 1 << 23  # numbers that BLAS combines in one call: each call waits for its slowest thread
COLUMNS = 1 << 17  # numbers that a column rule sees in one call
CANCELS = 16.0  # a combination this much shorter than its terms is summed in float64


@dataclass(frozen=True)
class Gram:
    """Inner products of an ordered list of rows, one matrix per layer. Merging layers is addition."""

    layers: Matrix  # (layers, rows, rows)

    @cached_property
    def whole(self) -> Matrix:
        return np.asarray(self.layers.sum(axis=0))

    @cached_property
    def norms(self) -> Matrix:
        return np.asarray(np.sqrt(np.diagonal(self.whole)))

    def __len__(self) -> int:
        return int(self.layers.shape[1])

    def of(self, rows: slice | Sequence[int] | NDArray[np.intp]) -> Gram:
        """The same for some of the rows, in the order given."""
        return Gram(self.layers[:, rows][:, :, rows])


class Kernel(Protocol):
    """What the engine needs from the device that holds the rows."""

    def hold(self, row: Row) -> Any: ...

    def products(self, new: Sequence[Any], old: Sequence[Any], cuts: Sequence[Chunk]) -> Iterable[Matrix]:
        """Inner products inside each chunk: one line per new row, one column per old row, then per new row."""

    def combine(
        self, rows: Sequence[Any], coefficients: Matrix, wide: NDArray[np.bool_], cuts: Sequence[Chunk], out: Row
    ) -> None:
        """Fills `out`, with one line of coefficients per layer; `wide` layers in float64 throughout."""

    def columns(self, rows: Sequence[Any], reduce: ColumnRule, cuts: Sequence[Chunk], out: Row) -> None: ...


ColumnRule = Callable[[Row], Row]  # (rows, columns) -> (columns,)


class GramEngine:
    """Rows by id, their inner products per layer, and combinations of them.

    >>> engine = GramEngine([2, 1])
    >>> engine.add("ann", np.array([1, 2, 3], np.float32))
    >>> engine.add("bob", np.array([0, 1, 1], np.float32))
    >>> engine.gram(["ann", "bob"]).whole
    array([[14.,  5.],
           [ 5.,  2.]])
    >>> engine.combine(["ann", "bob"], np.array([1.0, -2.0]))
    array([1., 0., 1.], dtype=float32)
    """

    def __init__(self, layers: Sequence[int], kernel: Kernel | None = None) -> None:
        self.layers = tuple(layers)
        self.size = sum(self.layers)
        self._kernel: Kernel = kernel or NumpyKernel()
        self._chunks = list(chunks(self.layers))
        self._slots: dict[Hashable, int] = {}
        self._rows: list[Any] = []
        self._products: Matrix = np.zeros((len(self.layers), 0, 0))
        self._lock = Lock()  # uploads may end at the same moment

    def __contains__(self, row_id: Hashable) -> bool:
        return row_id in self._slots

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, row_id: Hashable, row: Row) -> None:
        """Takes a row in and computes its products with the rows already there. The row must not change after."""
        self.extend({row_id: row})

    def extend(self, rows: Mapping[Hashable, Row]) -> None:
        """Takes many rows in; cheaper than one by one, and bit for bit the same."""
        with self._lock:
            held = {row_id: self._admit(row_id, row) for row_id, row in rows.items()}
            for batch in _batches(list(held.items()), BATCH):
                self._multiply(dict(batch))

    def adopt(self, rows: Mapping[Hashable, Row], products: Matrix) -> None:
        """Starts with rows whose mutual products (layers, rows, rows) are known, such as the history's."""
        with self._lock:
            if self._rows:
                raise ValueError(f"cannot adopt {len(rows)} rows: {len(self)} are here already; adopt before adding")
            self._keep({row_id: self._admit(row_id, row) for row_id, row in rows.items()})
            self._products[:, : len(rows), : len(rows)] = products

    def gram(self, order: Sequence[Hashable]) -> Gram:
        """The inner products of the rows in this order."""
        slots = np.array([self._slots[row_id] for row_id in order], dtype=np.intp)
        return Gram(self._products).of(slots)

    def combine(self, order: Sequence[Hashable], coefficients: Matrix, out: Row | None = None) -> Row:
        """The sum of coefficients times rows, with one coefficient per row or one per layer and row."""
        lines, target = np.atleast_2d(coefficients), self._target(out)
        used = np.flatnonzero(lines.any(axis=0))
        if not len(used):
            target.fill(0.0)
            return target
        order, lines = [order[at] for at in used.tolist()], lines[:, used]
        gram, cuts = self.gram(order).layers, self._chunks
        if coefficients.ndim == 1:  # layers make no difference: fewer and longer blocks
            gram, cuts = gram.sum(axis=0, keepdims=True), list(chunks([self.size]))
        self._kernel.combine(self._ordered(order), lines, _cancels(gram, lines), cuts, target)
        return target

    def columns(self, order: Sequence[Hashable], reduce: ColumnRule, out: Row | None = None) -> Row:
        """One number per column, from all the rows' entries in it: for rules that no inner product can express."""
        target = self._target(out)
        self._kernel.columns(self._ordered(order), reduce, self._chunks, target)
        return target

    def _admit(self, row_id: Hashable, row: Row) -> Any:
        if row_id in self._slots:
            raise ValueError(f"row {row_id!r} is here already; a round takes one row per client")
        if row.shape != (self.size,) or row.dtype.kind != "f":
            raise ValueError(
                f"row {row_id!r} is {row.dtype} of shape {row.shape}; expected floats of shape ({self.size},), "
                f"the sum of {len(self.layers)} layers"
            )
        return self._kernel.hold(row)

    def _keep(self, rows: Mapping[Hashable, Any]) -> None:
        for row_id, row in rows.items():
            self._slots[row_id] = len(self._rows)
            self._rows.append(row)
        room = self._products.shape[1]
        if room < len(self._rows):
            grown = np.zeros((len(self.layers), 2 * len(self._rows), 2 * len(self._rows)))
            grown[:, :room, :room] = self._products
            self._products = grown

    def _multiply(self, batch: Mapping[Hashable, Any]) -> None:
        old, new = tuple(self._rows), tuple(batch.values())
        self._keep(batch)
        lines, seen = slice(len(old), len(self._rows)), slice(0, len(self._rows))
        partial = self._kernel.products(new, old, self._chunks)
        for chunk, products in zip(self._chunks, partial, strict=True):  # in order: sums do not depend on threads
            self._products[chunk.layer, lines, seen] += products
        self._products[:, seen, lines] = self._products[:, lines, seen].transpose(0, 2, 1)

    def _ordered(self, order: Sequence[Hashable]) -> list[Any]:
        return [self._rows[self._slots[row_id]] for row_id in order]

    def _target(self, out: Row | None) -> Row:
        double = any(row.dtype.itemsize == 8 for row in self._rows)
        return np.empty(self.size, np.float64 if double else np.float32) if out is None else out


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
            if not exact[layer]:  # BLAS brings its own threads here
                narrow = coefficients[layer].astype(np.float32)
                _weighted_sum(matrix if whole else None, rows, narrow, Chunk(layer, start, stop), out)

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
        self.lines = -(-len(rows) // EVEN) * EVEN
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
    space, cuts = workspace((last.lines + TILE) * SEGMENT), list(segments(chunk))
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
    return _mirrored(_sum_in_order(dots)[:, : TILE * len(tiles) + last.size])


Copies = list[tuple[Matrix, Row]]
Products = list[tuple[Matrix, Matrix, list[Matrix]]]  # lines, a line, and per segment where their products go


def _plan(
    tiles: Sequence[Laid], last: Laid, new: int, space: Matrix, length: int, dots: Matrix
) -> Iterator[tuple[Copies, Products]]:
    """What is done in each segment of this length: prepared once, since Python would hold up both threads.

    A matrix times a vector is one dot product per row, in the same order of terms for each as long as the rows are
    a multiple of EVEN. A matrix times a matrix would be faster for many new rows, but there the last bits of an
    entry depend on its place.
    """
    lines, side = last.room(space, length), space[-TILE * length :].reshape(TILE, length)
    old, before = last.size - new, TILE * len(tiles)

    def products(tile: Matrix, first: int, at: int) -> Products:
        """The tile, which starts at column `at`, times the new rows from `first` on."""
        return [(tile, lines[old + k], list(dots[:, k, at : at + len(tile)])) for k in range(first, new)]

    parts = (products(lines[at : at + TILE], max(at - old, 0), before + at) for at in range(0, last.lines, TILE))
    yield last.into(lines), list(chain.from_iterable(parts))
    for place, tile in enumerate(tiles):
        yield tile.into(side), products(side, 0, place * TILE)


def _mirrored(total: Matrix) -> Matrix:
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
    total, spare = workspace(2 * (chunk.stop - chunk.start)).reshape(2, -1)
    total.fill(0.0)
    for row, coefficient in zip(rows, coefficients.tolist(), strict=True):
        np.copyto(spare, row[chunk.start : chunk.stop])  # far faster than a product of mixed types
        np.multiply(spare, coefficient, out=spare)
        np.add(total, spare, out=total)
    np.copyto(out[chunk.start : chunk.stop], total, casting="same_kind")


def _weighted_sum(matrix: Row | None, rows: Sequence[Row], coefficients: Row, chunk: Chunk, out: Row) -> None:
    """A weighted sum in float32, in blocks of the same shape however the rows lie in memory."""
    width = max(BLOCK // len(rows) // SEGMENT, 1) * SEGMENT
    for start in range(chunk.start, chunk.stop, width):
        stop = min(start + width, chunk.stop)
        if matrix is not None:
            block = matrix[:, start:stop]
        else:
            block = workspace(len(rows) * width).view(np.float32)[: len(rows) * (stop - start)].reshape(len(rows), -1)
            for target, row in zip(block, rows, strict=True):
                np.copyto(target, row[start:stop])
        np.matmul(coefficients, block, out=out[start:stop])


def _cancels(gram: Matrix, coefficients: Matrix) -> NDArray[np.bool_]:
    """Per layer: is the combination so much shorter than its terms that float32 sums would lose digits?"""
    square = np.einsum("li,lij,lj->l", coefficients, gram, coefficients)
    reach = (np.abs(coefficients) * np.sqrt(np.diagonal(gram, axis1=1, axis2=2))).sum(axis=1)
    return np.asarray(reach > CANCELS * np.sqrt(np.maximum(square, 0.0)))


def _batches(items: list[T], size: int) -> Iterator[list[T]]:
    source = iter(items)
    while batch := list(islice(source, size)):
        yield batch
