"""The Gram engine's kernel on torch, for a server whose rows fit on a CUDA device.

Import this module only where it is used: the server does not need torch. The kernel makes the
promises of the numpy kernel: float64 sums, and inner products that do not depend on the order in
which rows were added.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from fairfleet.server.gram.blocks import Chunk, ColumnRule, Matrix, Row, squared_length


class TorchKernel:
    """Rows on a torch device. Each is copied to it once, when it is added."""

    squares_alone: ClassVar[bool] = True

    def __init__(self, device: str = "cuda") -> None:
        """Store rows on this device, named as torch names it."""
        self.device = torch.device(device)

    def hold(self, row: Row) -> torch.Tensor:
        """Return a copy of the row on the device."""
        return torch.from_numpy(np.ascontiguousarray(row)).to(self.device)

    def products(
        self, new: Sequence[torch.Tensor], old: Sequence[torch.Tensor], cuts: Sequence[Chunk]
    ) -> Iterator[Matrix]:
        """Yield the inner products inside each chunk, of shape (new, old + new)."""
        for chunk in cuts:
            yield self._products(new, old, chunk)

    def squares(self, new: Sequence[torch.Tensor], cuts: Sequence[Chunk]) -> Iterator[Matrix]:
        """Yield, inside each chunk, the inner product of each new row with itself."""
        for chunk in cuts:
            wide = [self._wide(row, chunk) for row in new]
            yield np.array([float(torch.dot(row, row)) for row in wide])

    def combine(
        self,
        rows: Sequence[torch.Tensor],
        coefficients: Matrix,
        wide: NDArray[np.bool_],
        cuts: Sequence[Chunk],
        out: Row,
    ) -> Matrix:
        """Fill `out` with the combination, all of it summed in float64 whatever `wide` says.

        Return the squared length per line of coefficients.
        """
        squares = np.zeros(len(coefficients))
        for chunk in cuts:
            total = torch.zeros(chunk.stop - chunk.start, dtype=torch.float64, device=self.device)
            for row, coefficient in zip(rows, coefficients[chunk.layer].tolist(), strict=True):
                total.add_(self._wide(row, chunk), alpha=coefficient)
            with np.errstate(all="ignore"):
                out[chunk.start : chunk.stop] = total.cpu().numpy()
                squares[chunk.layer] += squared_length(out[chunk.start : chunk.stop])
        return squares

    def columns(
        self, rows: Sequence[torch.Tensor], reduce: ColumnRule, cuts: Sequence[Chunk], out: Row
    ) -> None:
        """Fill `out` with one number per column; `reduce` runs on the processor."""
        for chunk in cuts:
            stacked = torch.stack([row[chunk.start : chunk.stop] for row in rows])
            out[chunk.start : chunk.stop] = reduce(stacked.cpu().numpy())

    def _products(
        self, new: Sequence[torch.Tensor], old: Sequence[torch.Tensor], chunk: Chunk
    ) -> Matrix:
        """Multiply pair by pair: the rounding of a matrix product depends on the position."""
        new_rows = [self._wide(row, chunk) for row in new]
        total = torch.zeros(
            (len(new), len(old) + len(new)), dtype=torch.float64, device=self.device
        )
        for column, row in enumerate(old):
            old_row = self._wide(row, chunk)
            for line, new_row in zip(total, new_rows, strict=True):
                line[column] = torch.dot(new_row, old_row)
        for i, row_i in enumerate(new_rows):
            for j, row_j in enumerate(new_rows[: i + 1]):
                total[i, len(old) + j] = total[j, len(old) + i] = torch.dot(row_i, row_j)
        return np.asarray(total.cpu().numpy())

    def _wide(self, row: torch.Tensor, chunk: Chunk) -> torch.Tensor:
        return row[chunk.start : chunk.stop].to(torch.float64)
