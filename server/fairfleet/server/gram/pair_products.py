"""A cache of inner products of pairs of rows, per layer, used by the history.

Each client has a slot. The line of a slot contains its products with all slots up to its own.
Each pair is stored once, so the cache takes half the memory of the full (layers, rows, rows)
array, and a new client never moves stored products.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from fairfleet.server.gram.blocks import Matrix


class PairProducts:
    """The inner products of pairs of clients' rows, in each layer.

    >>> pairs = PairProducts(1)
    >>> pairs.store(["ann", "bob"], np.array([[[4.0, 2.0], [2.0, 9.0]]]))
    >>> pairs.forget("ann")
    >>> pairs.complete(["ann", "bob"])
    ['bob']
    >>> pairs.of(["bob"])
    array([[[9.]]])
    """

    def __init__(self, layers: int) -> None:
        """Create an empty cache for products in this number of layers."""
        self.layers = layers
        self._slots: dict[str, int] = {}
        self._free: list[int] = []
        self._lines: list[Matrix] = []  # line k has the shape (layers, k + 1)
        # Whether the product of two slots is stored; symmetric.
        self._stored: NDArray[np.bool_] = np.zeros((0, 0), np.bool_)

    def store(self, clients: Sequence[str], products: Matrix) -> None:
        """Store the products (layers, clients, clients) of these clients' rows."""
        slots = np.array([self._slot(client) for client in clients], dtype=np.intp)
        order = np.argsort(slots)
        slots = slots[order]
        for index, slot in enumerate(slots.tolist()):
            self._lines[slot][:, slots[: index + 1]] = products[:, order[index], order[: index + 1]]
        self._stored[np.ix_(slots, slots)] = True

    def complete(self, clients: Sequence[str]) -> list[str]:
        """Return clients whose mutual products are all stored, chosen greedily in this order."""
        candidates = [client for client in clients if client in self._slots]
        slots = np.array([self._slots[client] for client in candidates], dtype=np.intp)
        stored = self._stored[np.ix_(slots, slots)]
        chosen = np.zeros(len(candidates), np.bool_)
        for index in range(len(candidates)):
            chosen[index] = stored[index, index] and bool(stored[index][chosen].all())
        return [candidates[index] for index in np.flatnonzero(chosen).tolist()]

    def of(self, clients: Sequence[str]) -> Matrix:
        """Return the products (layers, clients, clients). All of them must be stored."""
        slots = np.array([self._slots[client] for client in clients], dtype=np.intp)
        order = np.argsort(slots)
        slots = slots[order]
        out = np.empty((self.layers, len(slots), len(slots)))
        for index, slot in enumerate(slots.tolist()):
            line, partners = self._lines[slot][:, slots[: index + 1]], order[: index + 1]
            out[:, order[index], partners] = line
            out[:, partners, order[index]] = line
        return out

    def forget(self, client: str) -> None:
        """Drop the client's products, because its row was replaced or removed."""
        if (slot := self._slots.pop(client, None)) is None:
            return
        self._stored[slot] = False
        self._stored[:, slot] = False
        self._free.append(slot)

    def _slot(self, client: str) -> int:
        if client not in self._slots:
            self._slots[client] = self._free.pop() if self._free else self._new_slot()
        return self._slots[client]

    def _new_slot(self) -> int:
        slot = len(self._lines)
        self._lines.append(np.zeros((self.layers, slot + 1)))
        if slot == len(self._stored):
            grown = np.zeros((slot + slot // 2 + 16,) * 2, np.bool_)
            grown[:slot, :slot] = self._stored
            self._stored = grown
        return slot
