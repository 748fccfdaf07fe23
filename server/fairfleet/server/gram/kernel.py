"""The interface between the Gram engine and the device that stores the rows.

A kernel reads the long rows. It promises float64 sums, and inner products that do not depend on
the order in which rows were added unless its documentation says otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from fairfleet.server.gram.blocks import Chunk, ColumnRule, Matrix, Row


class Kernel(Protocol):
    """The operations that the engine needs from the device that stores the rows."""

    # Whether `squares` returns the same bits as the diagonal of `products`.
    squares_alone: ClassVar[bool]

    def hold(self, row: Row) -> Any:
        """Return the row in the form in which this kernel stores it."""

    def products(
        self, new: Sequence[Any], old: Sequence[Any], cuts: Sequence[Chunk]
    ) -> Iterable[Matrix]:
        """Return the inner products inside each chunk, of shape (new, old + new).

        There is one line per new row; the columns are the old rows, then the new ones.
        """

    def squares(self, new: Sequence[Any], cuts: Sequence[Chunk]) -> Iterable[Matrix]:
        """Return, inside each chunk, the inner product of each new row with itself."""

    def combine(
        self,
        rows: Sequence[Any],
        coefficients: Matrix,
        wide: NDArray[np.bool_],
        cuts: Sequence[Chunk],
        out: Row,
    ) -> Matrix:
        """Fill `out` with the combination, using one line of coefficients per layer.

        Layers marked in `wide` are summed in float64 throughout. Return per line the squared
        length of what was written, infinite where a value is not finite.
        """

    def columns(
        self, rows: Sequence[Any], reduce: ColumnRule, cuts: Sequence[Chunk], out: Row
    ) -> None:
        """Fill `out` with one number per column, computed by `reduce` from the rows' entries."""
