"""The Gram engine: the only code that reads the long rows, and it reads each of them twice.

Rows are added one by one or many at a time; their inner products with the earlier rows are
computed at once. Later the rows are summed to one combination. An inner product is always the
same sum of float64 dot products over the same short segments. It therefore has the same bits for
every order of arrival, every size of batch and every number of threads. `Detail` says how much of
the products is stored. The rows belong to the caller; the engine copies none of them and needs
only a few blocks of memory more.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from itertools import groupby, islice
from threading import Lock
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from fairfleet.server.gram.blocks import CORES, ColumnRule, Matrix, Row, chunks
from fairfleet.server.gram.kernel import Kernel
from fairfleet.server.gram.numpy_kernel import NumpyKernel
from fairfleet.server.gram.products import (
    CANCELS,
    Detail,
    Gram,
    select_from_matrix,
    select_rows,
    sum_in_order,
)

T = TypeVar("T")

BATCH = 120  # new rows that are multiplied together: each old row is then read once per batch
# Products of single chunks that are in memory at the same time, before they are added up.
MAX_CHUNK_PRODUCTS = 1 << 20
RESERVED = 1024  # rows for which memory is reserved at once, if so many are expected
SMALLEST = float(np.finfo(np.float32).tiny)  # coefficients below it lose digits in float32
LARGEST = float(np.finfo(np.float32).max)


class GramEngine:
    """Rows by id, their inner products, and combinations of them.

    >>> engine = GramEngine([2, 1])
    >>> engine.add("ann", np.array([1, 2, 3], np.float32))
    >>> engine.add("bob", np.array([0, 1, 1], np.float32))
    >>> engine.gram(["ann", "bob"]).whole
    array([[14.,  5.],
           [ 5.,  2.]])
    >>> engine.combine(["ann", "bob"], np.array([1.0, -2.0]))
    array([1., 0., 1.], dtype=float32)
    """

    def __init__(
        self,
        layers: Sequence[int],
        kernel: Kernel | None = None,
        *,
        detail: Detail = Detail.LAYERS,
        expected: int = 0,
    ) -> None:
        """Create an engine for rows of these layer lengths.

        `expected` is the probable number of rows. Address space for their products is reserved;
        memory is used only once products are written.
        """
        self.layers = tuple(layers)
        self.size = sum(self.layers)
        self._kernel: Kernel = kernel or NumpyKernel()
        self.detail = self._possible(detail)
        self._expected = expected
        self._chunks = list(chunks(self.layers))
        self._slots: dict[Hashable, int] = {}
        self._rows: list[Any] = []
        self._products: Matrix = np.zeros((self.blocks, 0, 0))
        self._squares: Matrix = np.zeros(0)  # used instead of products at Detail.NORMS
        self._lock = Lock()  # uploads may end at the same moment

    def __contains__(self, row_id: Hashable) -> bool:
        return row_id in self._slots

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def blocks(self) -> int:
        """The number of stored product matrices: one per layer, or one for the whole model."""
        return len(self.layers) if self.detail is Detail.LAYERS else 1

    def add(self, row_id: Hashable, row: Row) -> None:
        """Add a row and compute its products with all earlier rows.

        The row must not change afterwards. Raises ValueError for an id that exists already and
        for a row of the wrong shape or type.
        """
        self.extend({row_id: row})

    def extend(self, rows: Mapping[Hashable, Row]) -> None:
        """Add many rows. This is cheaper than adding them one by one, and gives the same bits."""
        with self._lock:
            admitted = {row_id: self._admit(row_id, row) for row_id, row in rows.items()}
            self._reserve(len(self._rows) + len(admitted))
            for batch in _batches(list(admitted.items()), BATCH):
                self._multiply(dict(batch))

    def adopt(self, rows: Mapping[Hashable, Row], products: Matrix) -> None:
        """Start with rows whose mutual products are already computed, such as the history's.

        `products` has the shape (layers or 1, rows, rows). Raises ValueError if the engine
        already has rows.
        """
        with self._lock:
            if self._rows:
                raise ValueError(
                    f"cannot adopt {len(rows)} rows: the engine already has {len(self)}; "
                    "adopt before adding"
                )
            self._append({row_id: self._admit(row_id, row) for row_id, row in rows.items()})
            if self.detail is Detail.WHOLE and len(products) > 1:
                products = sum_in_order(products)[None]
            if self.detail is Detail.NORMS:
                self._squares = sum_in_order(np.diagonal(products, axis1=1, axis2=2))
            else:
                self._products[:, : len(rows), : len(rows)] = products

    def reduce(self, detail: Detail) -> None:
        """Store no more than this detail from now on.

        What remains has the bits that it would have had at this detail from the start.
        """
        with self._lock:
            if (detail := self._possible(detail)) >= self.detail:
                return
            if self.detail is Detail.LAYERS:
                self._products = sum_in_order(self._products)[None]
            if detail is Detail.NORMS:
                self._squares = np.diagonal(self._products[0])[: len(self._rows)].copy()
                self._products = np.zeros((1, 0, 0))
            self.detail = detail

    def arrange(self, order: Sequence[Hashable]) -> None:
        """Store the products in this order, so that `gram(order)` needs no copy of them.

        Does nothing unless `order` contains all rows. Results of earlier calls of `gram` must
        not be used any more.
        """
        with self._lock:
            slots = self._slots_of(order)
            if self.detail is Detail.NORMS or len(slots) != len(self._rows):
                return
            if self._products.shape[1] == len(slots) and bool(
                (slots == np.arange(len(slots))).all()
            ):
                return
            self._rearrange(slots)
            self._rows = [self._rows[slot] for slot in slots.tolist()]
            self._slots = {row_id: slot for slot, row_id in enumerate(order)}

    def gram(self, order: Sequence[Hashable], detail: Detail = Detail.LAYERS) -> Gram:
        """Return the products of the rows in this order, at `detail` or the lower stored one."""
        slots, detail = self._slots_of(order), min(detail, self.detail)
        if detail is Detail.NORMS:
            return Gram(squares=self._squares_of(slots))
        if self.detail is Detail.LAYERS and detail is Detail.WHOLE:
            total = np.zeros((len(slots), len(slots)))
            for products in self._products:
                total += select_from_matrix(products, slots)
            return Gram(matrix=total)
        selected = select_rows(self._products, slots)
        return Gram(matrix=selected[0]) if detail is Detail.WHOLE else Gram(selected)

    def norms(self, order: Sequence[Hashable]) -> Matrix:
        """Return the lengths of the rows in this order."""
        return np.asarray(np.sqrt(self._squares_of(self._slots_of(order))))

    def combine(
        self,
        order: Sequence[Hashable],
        coefficients: Matrix,
        out: Row | None = None,
        wide: NDArray[np.bool_] | None = None,
    ) -> Row:
        """Return the sum of coefficients times rows, written to `out` if it is given.

        `coefficients` has the shape (rows,), or (layers, rows). Every value that fits the type of
        the result is finite, even if a term or a partial sum does not fit. `wide` says, per line
        of coefficients, what to sum in float64 (see `cancels`); without it, the engine decides
        from the result.
        """
        return self.combine_checked(order, coefficients, out, wide)[0]

    def combine_checked(
        self,
        order: Sequence[Hashable],
        coefficients: Matrix,
        out: Row | None = None,
        wide: NDArray[np.bool_] | None = None,
    ) -> tuple[Row, bool]:
        """Return the combination as `combine` does, and whether all of it is finite."""
        lines, target = np.atleast_2d(coefficients), self._target(out)
        per_layer = coefficients.ndim == 2
        used = np.flatnonzero(lines.any(axis=0))
        if not len(used):
            target.fill(0.0)
            return target, True
        ids, lines = [order[index] for index in used.tolist()], lines[:, used]
        terms = np.abs(lines) * self.norms(ids)
        reach = float(terms.sum()) if wide is None and not per_layer else None
        if wide is None:
            wide = np.full(len(lines), per_layer)
        wide = wide | _beyond_float32(lines, terms)
        # One line of coefficients needs no cuts at layers, so the blocks are fewer and longer.
        cuts = self._chunks if per_layer else list(chunks([self.size]))
        rows = self._ordered(ids)
        squares = self._kernel.combine(rows, lines, wide, cuts, target)
        if target.dtype == np.float32 and (again := _lost(squares, wide, reach)).any():
            cuts = [chunk for chunk in cuts if again[chunk.layer]]
            exact_squares = self._kernel.combine(rows, lines, again, cuts, target)
            squares = np.where(again, exact_squares, squares)
        return target, bool(np.isfinite(squares).all())

    def columns(self, order: Sequence[Hashable], reduce: ColumnRule, out: Row | None = None) -> Row:
        """Return one number per column, computed by `reduce` from all rows' entries in it.

        Rules that no inner product can express, such as the median, use this.
        """
        target = self._target(out)
        self._kernel.columns(self._ordered(order), reduce, self._chunks, target)
        return target

    def _admit(self, row_id: Hashable, row: Row) -> Any:
        if row_id in self._slots:
            raise ValueError(f"row {row_id!r} was added before; a round takes one row per client")
        if row.shape != (self.size,) or row.dtype.kind != "f":
            raise ValueError(
                f"row {row_id!r} is {row.dtype} of shape {row.shape}; expected floats of shape "
                f"({self.size},), the sum of {len(self.layers)} layers"
            )
        return self._kernel.hold(row)

    def _possible(self, detail: Detail) -> Detail:
        return detail if self._kernel.squares_alone else max(detail, Detail.WHOLE)

    def _slots_of(self, order: Sequence[Hashable]) -> NDArray[np.intp]:
        return np.array([self._slots[row_id] for row_id in order], dtype=np.intp)

    def _squares_of(self, slots: NDArray[np.intp]) -> Matrix:
        if self.detail is Detail.NORMS:
            return self._squares[slots]
        return sum_in_order(self._products[:, slots, slots])

    def _append(self, rows: Mapping[Hashable, Any]) -> None:
        for row_id, row in rows.items():
            self._slots[row_id] = len(self._rows)
            self._rows.append(row)
        self._reserve(len(self._rows))

    def _reserve(self, count: int) -> None:
        """Make room for the products of `count` rows, or of those expected if not too many."""
        capacity = self._products.shape[1]
        if count <= capacity or self.detail is Detail.NORMS:
            return
        room = min(max(count, self._expected, capacity + capacity // 2), max(RESERVED, 2 * count))
        grown = np.zeros((self.blocks, room, room))  # unwritten pages use no memory
        grown[:, :capacity, :capacity] = self._products
        self._products = grown

    def _rearrange(self, slots: NDArray[np.intp]) -> None:
        """Write the products in the order of the slots, without gaps, into the same memory.

        Each matrix moves to where it or earlier matrices were, so nothing unread is overwritten.
        """
        count, flat = len(slots), self._products.reshape(-1)
        for block, products in enumerate(self._products):
            arranged = select_from_matrix(products, slots).reshape(-1)
            flat[block * count**2 : (block + 1) * count**2] = arranged
        self._products = flat[: self.blocks * count**2].reshape(-1, count, count)

    def _multiply(self, batch: Mapping[Hashable, Any]) -> None:
        old, new = tuple(self._rows), tuple(batch.values())
        self._append(batch)
        if self.detail is Detail.NORMS:
            self._squares = np.concatenate([self._squares, self._summed_squares(new)])
            return
        lines, columns = slice(len(old), len(self._rows)), slice(0, len(self._rows))
        for layer, products in self._summed_products(new, old):
            block = layer if self.detail is Detail.LAYERS else 0
            self._products[block, lines, columns] += products
        for matrix in self._products:
            matrix[columns, lines] = matrix[lines, columns].T

    def _summed_products(
        self, new: Sequence[Any], old: Sequence[Any]
    ) -> Iterator[tuple[int, Matrix]]:
        """Yield each layer with the products of the new rows with all rows in it.

        Chunks are added in their order, so sums do not depend on the number of threads.
        """
        together = max(MAX_CHUNK_PRODUCTS // (len(new) * (len(old) + len(new))), 2 * CORES)

        def chunk_products() -> Iterator[Matrix]:
            for cuts in _batches(self._chunks, together):
                yield from self._kernel.products(new, old, cuts)

        pairs = zip(self._chunks, chunk_products(), strict=True)
        for layer, inside in groupby(pairs, lambda pair: pair[0].layer):
            yield layer, sum_in_order(products for _, products in inside)

    def _summed_squares(self, new: Sequence[Any]) -> Matrix:
        pairs = zip(self._chunks, self._kernel.squares(new, self._chunks), strict=True)
        total = np.zeros(len(new))
        for _, inside in groupby(pairs, lambda pair: pair[0].layer):
            total += sum_in_order(squares for _, squares in inside)
        return total

    def _ordered(self, order: Sequence[Hashable]) -> list[Any]:
        return [self._rows[self._slots[row_id]] for row_id in order]

    def _target(self, out: Row | None) -> Row:
        double = any(row.dtype.itemsize == 8 for row in self._rows)
        return np.empty(self.size, np.float64 if double else np.float32) if out is None else out


def _lost(squares: Matrix, wide: NDArray[np.bool_], reach: float | None) -> NDArray[np.bool_]:
    """Return, per line, whether its float32 sum overflowed or lost digits to cancellation.

    `reach` is the length of all terms together; None if cancellation needs no check.
    """
    lost: NDArray[np.bool_] = ~(wide | np.isfinite(squares))
    if reach is not None and not wide[0]:
        lost |= reach > CANCELS * np.sqrt(squares)
    return lost


def _beyond_float32(lines: Matrix, terms: Matrix) -> NDArray[np.bool_]:
    """Return, per line, whether a coefficient cannot be rounded to float32.

    It would overflow there, or lose digits although its term is not negligible.
    """
    sizes = np.abs(lines)
    small = (sizes < SMALLEST) & (terms > terms.max(axis=1, initial=0.0)[:, None] * 2.0**-24)
    return np.asarray((small | (sizes > LARGEST)).any(axis=1))


def _batches(items: list[T], size: int) -> Iterator[list[T]]:
    source = iter(items)
    while batch := list(islice(source, size)):
        yield batch
