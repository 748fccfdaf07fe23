"""The conflict map: which clients' updates disagree in a round, and in which layer.

A round stores a small copy of the inner products that its step was computed from. Cosines are
computed on request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

CONFLICT = -1e-9  # an update with a cosine below this disagrees with the direction
MAX_CLIENTS = 100  # larger rounds have no map, because it grows with the square of this number
MAX_PRODUCTS = 4_000_000  # in a map

Floats = NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class ConflictMap:
    """Inner products of a round's updates, and their cosines with the direction."""

    round: int
    clients: tuple[str, ...]
    products: Floats  # (layers, clients, clients): inner products of their updates
    # (layers, clients): cosines between updates and direction, inside each layer
    layer_directions: Floats
    directions: Floats  # (clients): the same over all layers

    @classmethod
    def of(
        cls,
        round_number: int,
        clients: Sequence[str],
        products: NDArray[np.float64],
        layer_directions: NDArray[np.float64],
        directions: NDArray[np.float64],
    ) -> ConflictMap | None:
        """Return the map, or None if it would be too large.

        Products of the history's rows, which follow those of the clients, are left out.
        """
        count = len(clients)
        if count > MAX_CLIENTS or len(products) * count**2 > MAX_PRODUCTS:
            return None
        return cls(
            round_number,
            tuple(clients),
            _in_float32(products[:, :count, :count]),
            layer_directions.astype(np.float32),
            directions.astype(np.float32),
        )

    def __eq__(self, other: object) -> bool:
        """Return whether all values are equal bit by bit."""
        if not isinstance(other, ConflictMap):
            return NotImplemented
        arrays = zip(self._arrays(), other._arrays(), strict=True)
        same = (self.round, self.clients) == (other.round, other.clients)
        return same and all(np.array_equal(mine, theirs) for mine, theirs in arrays)

    __hash__ = None  # type: ignore[assignment]

    def _arrays(self) -> tuple[Floats, ...]:
        return self.products, self.layer_directions, self.directions

    def cosines(self, layer: int | None = None) -> NDArray[np.float64]:
        """Return the cosines between updates, over all layers or in one; 0 for a zero update."""
        chosen = self.products if layer is None else self.products[layer : layer + 1]
        inner = chosen.astype(np.float64).sum(axis=0)
        norms = np.sqrt(np.maximum(np.diagonal(inner), 0.0))
        lengths = np.outer(norms, norms)
        cosines = np.divide(inner, lengths, out=np.zeros_like(inner), where=lengths > 0.0)
        return np.asarray(np.clip(cosines, -1.0, 1.0))

    def with_direction(self, layer: int | None = None) -> Floats:
        """Return each update's cosine with the direction, over all layers or inside one."""
        return self.directions if layer is None else self.layer_directions[layer]

    def conflicting(self, layer: int | None = None) -> int:
        """Return how many clients the direction, or its part in one layer, harms."""
        return int((self.with_direction(layer) < CONFLICT).sum())

    def disagreement(self) -> list[int]:
        """Return, for each layer, how many clients its part of the direction harms."""
        return [int(count) for count in (self.layer_directions < CONFLICT).sum(axis=1)]


def _in_float32(products: NDArray[np.float64]) -> Floats:
    """Return the products in float32, scaled if they are very large or small.

    Only their proportions matter, because they are used for cosines only.
    """
    exponent = int(np.frexp(np.abs(products).max(initial=0.0))[1])
    return (products if abs(exponent) < 100 else np.ldexp(products, -exponent)).astype(np.float32)
