"""The Gram engine's kernel on torch, for a server whose rows fit on a CUDA device.

Import it only when it is asked for: the server does without torch. The promises are those of the numpy kernel:
float64 sums, and inner products that do not depend on who came first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from fairfleet.server.blocks import Chunk, ColumnRule, Matrix, Row


class TorchKernel:
    """Rows on a torch device. Each is copied there once, when it is added."""

    def __init__(self, device: str = "cuda") -> None:
        self.device = torch.device(device)

    def hold(self, row: Row) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(row)).to(self.device)

    def products(
        self, new: Sequence[torch.Tensor], old: Sequence[torch.Tensor], cuts: Sequence[Chunk]
    ) -> Iterator[Matrix]:
        for chunk in cuts:
            yield self._products(new, old, chunk)

    def combine(
        self,
        rows: Sequence[torch.Tensor],
        coefficients: Matrix,
        wide: NDArray[np.bool_],
        cuts: Sequence[Chunk],
        out: Row,
    ) -> None:
        for chunk in cuts:
            total = torch.zeros(chunk.stop - chunk.start, dtype=torch.float64, device=self.device)
            for row, coefficient in zip(rows, coefficients[chunk.layer].tolist(), strict=True):
                total.add_(self._wide(row, chunk), alpha=coefficient)
            out[chunk.start : chunk.stop] = total.cpu().numpy()

    def columns(self, rows: Sequence[torch.Tensor], reduce: ColumnRule, cuts: Sequence[Chunk], out: Row) -> None:
        for chunk in cuts:
            stacked = torch.stack([row[chunk.start : chunk.stop] for row in rows])
            out[chunk.start : chunk.stop] = reduce(stacked.cpu().numpy())

    def _products(self, new: Sequence[torch.Tensor], old: Sequence[torch.Tensor], chunk: Chunk) -> Matrix:
        mine = [self._wide(row, chunk) for row in new]
        total = torch.zeros((len(new), len(old) + len(new)), dtype=torch.float64, device=self.device)
        for at, row in enumerate(old):
            other = self._wide(row, chunk)
            for line, one in zip(total, mine, strict=True):
                line[at] = torch.dot(one, other)  # pair by pair: a matrix product rounds by place
        for i, one in enumerate(mine):
            for j, other in enumerate(mine[: i + 1]):
                total[i, len(old) + j] = total[j, len(old) + i] = torch.dot(one, other)
        return np.asarray(total.cpu().numpy())

    def _wide(self, row: torch.Tensor, chunk: Chunk) -> torch.Tensor:
        return row[chunk.start : chunk.stop].to(torch.float64)
