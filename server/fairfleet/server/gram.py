"""The Gram engine: the only code that reads d-dimensional rows, and it reads each of them twice.

Rows come in one by one (their inner products with the rows already there are computed at once) and go out as one
combination. An inner product is always the same sum of float64 dot products over the same short segments, whoever
came first, however many came together and on however many threads: arrival order cannot change a bit of it.
The rows belong to the caller; nothing here copies one or keeps more than a few blocks beside them.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from threading import Lock
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from fairfleet.server.blocks import Chunk, ColumnRule, Matrix, Row, chunks
from fairfleet.server.gram_numpy import NumpyKernel

T = TypeVar("T")

BATCH = 120  # new rows that are multiplied together: each old row is then read once per batch
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

    def scaled(self, factors: Matrix) -> Gram:
        """Of the same rows, each multiplied by its factor."""
        return self if (factors == 1.0).all() else Gram(self.layers * np.outer(factors, factors))


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

    def norms(self, order: Sequence[Hashable]) -> Matrix:
        """The lengths of the rows in this order."""
        slots = np.array([self._slots[row_id] for row_id in order], dtype=np.intp)
        return np.asarray(np.sqrt(self._products[:, slots, slots].sum(axis=0)))

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


def _cancels(gram: Matrix, coefficients: Matrix) -> NDArray[np.bool_]:
    """Per layer: is the combination so much shorter than its terms that float32 sums would lose digits?"""
    square = np.einsum("li,lij,lj->l", coefficients, gram, coefficients)
    reach = (np.abs(coefficients) * np.sqrt(np.diagonal(gram, axis1=1, axis2=2))).sum(axis=1)
    return np.asarray(reach > CANCELS * np.sqrt(np.maximum(square, 0.0)))


def _batches(items: list[T], size: int) -> Iterator[list[T]]:
    source = iter(items)
    while batch := list(islice(source, size)):
        yield batch
