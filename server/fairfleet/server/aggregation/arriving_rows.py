"""The rows of the round under way: multiplied as they arrive, while other clients still train."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence

from fairfleet.common.tensors import Vector
from fairfleet.server.aggregation.aggregator import Aggregation


class ArrivingRows:
    """Collects the rows of one round after the other.

    `begin` makes the aggregation of a round, given the clients that are expected in it. `clip`
    bounds rows in place before they are used. `add` may be called from another thread than the
    rest.
    """

    def __init__(
        self,
        begin: Callable[[Sequence[str]], Aggregation],
        clip: Callable[[Iterable[Vector]], None] | None = None,
    ) -> None:
        self.aggregation: Aggregation | None = None  # None: no row of the round was multiplied yet
        self._begin, self._clip = begin, clip
        self._expected: frozenset[str] = frozenset()
        self._arrived: deque[tuple[str, Vector]] = deque()
        # Revoked clients: a row of theirs may still be on its way to `multiply`.
        self._withdrawn: set[str] = set()

    def add(self, client: str, row: Vector, selected: Iterable[str]) -> None:
        """Accept the row of a complete update."""
        self._expected = self._expected.union(selected, [client])
        self._arrived.append((client, row))

    def withdraw(self, client: str) -> None:
        """Remove the row of a revoked client, now or when it arrives."""
        self._withdrawn.add(client)
        if self.aggregation:
            self.aggregation.withdraw(client)

    def multiply(self) -> None:
        """Compute the inner products of rows that arrived.

        Rows that arrived together are multiplied together: reading a row once for several others
        is cheaper.
        """
        if not self._arrived:
            return
        if self.aggregation is None:
            self.aggregation = self._begin(sorted(self._expected))
        self.aggregation.expect(self._expected)
        while self._arrived:
            arrived = dict(self._arrived.popleft() for _ in range(len(self._arrived)))
            rows = {client: row for client, row in arrived.items() if client not in self._withdrawn}
            if self._clip:
                self._clip(rows.values())
            self.aggregation.extend(rows)

    def clear(self) -> None:
        """Begin the next round."""
        self.aggregation, self._expected = None, frozenset()
