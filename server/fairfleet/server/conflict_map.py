"""Who disagrees with whom in a round, and in which layer: cosines from the inner products that its step was made of.

What a round keeps for it is a small copy; cosines are computed when somebody looks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

CONFLICT = -1e-9  # a cosine: below it, an update and the direction disagree beyond rounding
MOST_CLIENTS = 100  # the map grows squared: larger rounds have none
MOST_NUMBERS = 4_000_000

Floats = NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class ConflictMap:
    round: int
    clients: tuple[str, ...]
    products: Floats  # (layers, clients, clients): inner products of their updates
    layer_directions: Floats  # (layers, clients): cosine between update and direction, inside each layer
    directions: Floats  # (clients): the same over the whole model

    @classmethod
    def of(
        cls,
        round: int,
        clients: Sequence[str],
        products: NDArray[np.float64],
        layer_directions: NDArray[np.float64],
        directions: NDArray[np.float64],
    ) -> ConflictMap | None:
        """None where it would be too large. Rows after those of the clients (of the history) are left out."""
        count = len(clients)
        if count > MOST_CLIENTS or len(products) * count**2 > MOST_NUMBERS:
            return None
        kept = products[:, :count, :count].astype(np.float32)
        told = layer_directions.astype(np.float32), directions.astype(np.float32)
        return cls(round, tuple(clients), kept, *told)

    def __eq__(self, other: object) -> bool:
        """To the last bit: what one round gave is compared with what another order of arrival gave."""
        if not isinstance(other, ConflictMap):
            return NotImplemented
        arrays = zip(self._arrays(), other._arrays(), strict=True)
        same = (self.round, self.clients) == (other.round, other.clients)
        return same and all(np.array_equal(mine, theirs) for mine, theirs in arrays)

    __hash__ = None  # type: ignore[assignment]

    def _arrays(self) -> tuple[Floats, ...]:
        return self.products, self.layer_directions, self.directions

    def cosines(self, layer: int | None = None) -> NDArray[np.float64]:
        """Between the clients' updates, over the whole model or inside one layer; 0 where an update is zero."""
        chosen = self.products if layer is None else self.products[layer : layer + 1]
        inner = chosen.astype(np.float64).sum(axis=0)
        norms = np.sqrt(np.maximum(np.diagonal(inner), 0.0))
        lengths = np.outer(norms, norms)
        found = np.divide(inner, lengths, out=np.zeros_like(inner), where=lengths > 0.0)
        return np.asarray(np.clip(found, -1.0, 1.0))

    def with_direction(self, layer: int | None = None) -> Floats:
        return self.directions if layer is None else self.layer_directions[layer]

    def conflicting(self, layer: int | None = None) -> int:
        """How many clients the direction, or its part in this layer, harms."""
        return int((self.with_direction(layer) < CONFLICT).sum())

    def disagreement(self) -> list[int]:
        """Per layer: how many clients its part of the direction harms."""
        return [int(count) for count in (self.layer_directions < CONFLICT).sum(axis=1)]
