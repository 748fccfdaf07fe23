"""The Gram matrix of a list of rows: all their inner products, from which rules choose a step.

The products are stored per layer, for the model as a whole, or only as the rows' lengths
(`Detail`). Layers are always added in their order, so a product of whole rows has the same bits
in each of the three.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import IntEnum
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from fairfleet.common.errors import Bug
from fairfleet.server.gram.blocks import Matrix

CANCELS = 16.0  # a combination this much shorter than its terms is summed in float64


class Detail(IntEnum):
    """How much of the inner products is computed and stored; each level includes those before."""

    NORMS = 0  # each row with itself
    WHOLE = 1  # all pairs of rows, over the whole model
    LAYERS = 2  # all pairs of rows, inside each layer


class Gram:
    """Inner products of an ordered list of rows.

    A Gram is built from exactly one of: `layers` of shape (layers, rows, rows), `matrix` of shape
    (rows, rows) for the whole model, or `squares` of shape (rows,). Merging layers is addition,
    in the order of the layers.

    >>> gram = Gram(matrix=np.array([[4.0, 2.0], [2.0, 9.0]]))
    >>> gram.norms
    array([2., 3.])
    >>> gram.of([1]).whole
    array([[9.]])
    """

    def __init__(
        self,
        layers: Matrix | None = None,
        *,
        matrix: Matrix | None = None,
        squares: Matrix | None = None,
    ):
        """Build the Gram from one of the three arrays; raise ValueError for none or several."""
        if [layers is None, matrix is None, squares is None].count(False) != 1:
            raise ValueError("a Gram takes exactly one of layers, matrix and squares")
        self._layers = layers
        self._matrix = matrix
        self._squares = squares

    @property
    def detail(self) -> Detail:
        """The level of detail of the stored products."""
        if self._layers is not None:
            return Detail.LAYERS
        return Detail.NORMS if self._matrix is None else Detail.WHOLE

    @property
    def layers(self) -> Matrix:
        """The products inside each layer, of shape (layers, rows, rows).

        Raises Bug unless the rule's needs() contain layers=True.
        """
        if self._layers is None:
            raise Bug(
                "inner products per layer were read but not requested; "
                "return Needs(layers=True) from needs()"
            )
        return self._layers

    @cached_property
    def whole(self) -> Matrix:
        """The products over the whole model, of shape (rows, rows).

        Raises Bug if the rule's needs() contain products=False.
        """
        if self._layers is not None:
            return sum_in_order(self._layers)
        if self._matrix is None:
            raise Bug(
                "inner products were read, but the rule's needs() say products=False; "
                "leave that out"
            )
        return self._matrix

    @property
    def blocks(self) -> Matrix:
        """The products as stored: (layers, rows, rows), or (1, rows, rows) for the whole model."""
        return self.whole[None] if self._layers is None else self._layers

    @cached_property
    def norms(self) -> Matrix:
        """The Euclidean length of each row, of shape (rows,)."""
        return np.asarray(
            np.sqrt(np.diagonal(self.whole) if self._squares is None else self._squares)
        )

    def __len__(self) -> int:
        arrays = (self._squares, self._matrix, self._layers)
        stored = next(array for array in arrays if array is not None)
        return int(stored.shape[-1])

    def of(self, rows: slice | Sequence[int] | NDArray[np.intp]) -> Gram:
        """Return the products of some of the rows, in the order given.

        Nothing is copied for a slice, or for all rows in their present order.
        """
        if not isinstance(rows, slice):
            rows = np.asarray(rows, dtype=np.intp)
            if np.array_equal(rows, np.arange(len(self))):
                return self
        if self._squares is not None:
            return Gram(squares=self._squares[rows])
        blocks = select_rows(self.blocks, rows)
        return Gram(matrix=blocks[0]) if self._layers is None else Gram(blocks)

    def scaled(self, factors: Matrix) -> Gram:
        """Return the products of the same rows, each multiplied by its factor."""
        if (factors == 1.0).all():
            return self
        if self._squares is not None:
            return Gram(squares=self._squares * (factors * factors))
        outer = np.outer(factors, factors)
        if self._layers is None:
            return Gram(matrix=self.whole * outer)
        return Gram(self._layers * outer)


def cancels(gram: Gram, coefficients: Matrix) -> NDArray[np.bool_]:
    """Return, per line of coefficients, whether a float32 sum of the rows would lose digits.

    It would where the combination is more than CANCELS times shorter than its terms together.
    `coefficients` has the shape (rows,), or (layers, rows) with one line per layer. If the
    products of single layers are not stored, every line per layer is summed in float64.
    """
    lines = np.atleast_2d(coefficients)
    if coefficients.ndim == 2 and gram.detail is not Detail.LAYERS:
        return np.ones(len(lines), np.bool_)
    matrices = gram.layers if coefficients.ndim == 2 else gram.whole[None]
    loses_digits = np.zeros(len(lines), np.bool_)
    for index, (line, matrix) in enumerate(zip(lines, matrices, strict=True)):
        reach = float(np.abs(line) @ np.sqrt(np.diagonal(matrix)))
        loses_digits[index] = reach > CANCELS * np.sqrt(max(float(line @ matrix @ line), 0.0))
    return loses_digits


def sum_in_order(parts: Iterable[Matrix]) -> Matrix:
    """Return the sum of the parts, added one after another.

    numpy's own sum groups the terms by their number and memory layout, which changes the bits.
    """
    total: Matrix | None = None
    for part in parts:
        if total is None:
            total = np.zeros(part.shape)
        total += part
    return np.zeros(0) if total is None else total


def select_from_matrix(matrix: Matrix, rows: NDArray[np.intp]) -> Matrix:
    """Return a copy of the given rows and the same columns of a square matrix, in that order."""
    return matrix.take(rows, axis=0).take(rows, axis=1)


def select_rows(matrices: Matrix, rows: slice | NDArray[np.intp]) -> Matrix:
    """Return the products of the given rows in every one of the (layers, rows, rows) matrices.

    Nothing is copied for a slice, or where all rows are already stored in this order.
    """
    if isinstance(rows, slice):
        return matrices[:, rows, rows]
    if len(rows) == matrices.shape[1] and bool((rows == np.arange(len(rows))).all()):
        return matrices
    out = np.empty((len(matrices), len(rows), len(rows)))
    for index, matrix in enumerate(matrices):
        out[index] = select_from_matrix(matrix, rows)
    return out
