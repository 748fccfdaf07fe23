"""The history: the latest row of every client, with the round whose model it was computed on.

Rules use it to take absent clients into account. Rows are in memory or in memory-mapped files, in
float32, or in float16 with a scale per row (`half_rows`). Their inner products are cached, so a new
round costs only the products of its own rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, Protocol

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, PositiveInt

from fairfleet.server.aggregation.half_rows import ScaledRow, encode_row
from fairfleet.server.gram import Detail, Gram, GramEngine
from fairfleet.server.gram.blocks import Matrix, Row
from fairfleet.server.gram.pair_products import PairProducts
from fairfleet.server.rules import PastRow

Precision = Literal["float32", "float16", "float64"]


class HistorySettings(BaseModel):
    """What is kept of each client's latest update, for rules that use those of absent clients."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    precision: Literal["float32", "float16"] = Field(
        default="float32", description="number format of the stored rows"
    )
    keep_rounds: PositiveInt | None = Field(
        default=None, description="rows older than this are deleted; default: never"
    )
    keep_bytes: PositiveInt | None = Field(
        default=None, description="the oldest rows beyond this size are deleted"
    )


class RowStore(Protocol):
    """Where the history's rows are stored."""

    def put(self, past: PastRow, row: Row, exponent: int = 0) -> Row:
        """Store a row, of values times 2^exponent; return the stored values."""

    def drop(self, past: PastRow) -> None:
        """Delete a row that the history no longer uses."""

    def stored(self) -> Iterable[tuple[PastRow, ScaledRow]]:
        """Return the rows of an earlier run."""


class History:
    """Stores one row per client, and the rows' inner products.

    >>> history = History([2])
    >>> history.put("ann", 3, np.array([3, 4], np.float32))
    True
    >>> history.put("ann", 2, np.array([0, 0], np.float32))  # older than the stored row
    False
    >>> history.rows()["ann"].round, history.products(["ann"])
    (3, array([[[25.]]]))
    """

    def __init__(
        self, layers: Sequence[int], store: RowStore | None = None, precision: Precision = "float32"
    ) -> None:
        """`layers` has the sizes of the model's blocks; by default rows are stored in memory."""
        self.layers = tuple(layers)
        self.precision: Precision = precision
        self._store = store or InMemoryRows()
        self._rows: dict[str, tuple[PastRow, ScaledRow]] = {
            past.client: (past, row) for past, row in self._store.stored()
        }
        self._products = PairProducts(len(self.layers))

    def __len__(self) -> int:
        return len(self._rows)

    def put(
        self,
        client: str,
        round_number: int,
        row: Row,
        *,
        loss: float | None = None,
        samples: float | None = None,
    ) -> bool:
        """Store a copy of the row if it is newer than the client's last; return whether it was.

        So a late update is stored, unless a newer one of its client has arrived.
        """
        before = self._rows.get(client)
        if before and before[0].round >= round_number:
            return False
        past = PastRow(client, round_number, loss, samples)
        self.install(past, self.write(past, row))
        return True

    def write(self, past: PastRow, row: Row) -> ScaledRow:
        """Store a copy of the row; it becomes the client's latest when it is installed.

        Raises ValueError for a row of another length than the model's.
        """
        if row.shape != (sum(self.layers),):
            raise ValueError(
                f"row of {past.client!r} has shape {row.shape}; expected ({sum(self.layers)},), "
                "the length of this history's rows"
            )
        values, exponent = encode_row(row, self.precision)
        return ScaledRow(self._store.put(past, values, exponent), exponent)

    def install(self, past: PastRow, row: ScaledRow) -> None:
        """Make a written row the client's latest; drop the one before."""
        self._products.forget(past.client)
        if before := self._rows.get(past.client):
            self._store.drop(before[0])
        self._rows[past.client] = (past, row)

    def discard(self, client: str) -> None:
        """Delete the row of a client, if it has one."""
        if client in self._rows:
            past, _ = self._rows.pop(client)
            self._products.forget(client)
            self._store.drop(past)

    def surplus(
        self, round_number: int, *, rounds: int | None = None, size_bytes: int | None = None
    ) -> list[str]:
        """Return clients with rows older than `rounds`, and the oldest beyond `size_bytes`."""
        by_age = sorted(self._rows, key=lambda client: (self._rows[client][0].round, client))
        row_bytes = sum(self.layers) * np.dtype(self.precision).itemsize
        too_many = len(by_age) - size_bytes // row_bytes if size_bytes is not None else 0
        return [
            client
            for index, client in enumerate(by_age)
            if index < too_many
            or (rounds is not None and round_number - self._rows[client][0].round > rounds)
        ]

    def rows(self) -> dict[str, PastRow]:
        """Return which rows there are, by client id and in its order.

        Another thread may change the rows meanwhile.
        """
        rows = self._rows.copy()
        return {client: rows[client][0] for client in sorted(rows)}

    def row(self, client: str) -> Row:
        """Return the client's row: the stored values, or a float32 copy if they are scaled."""
        return self._rows[client][1].decoded()

    def within(self, round_number: int, window: int) -> list[str]:
        """Return the clients whose row is at least one and at most `window` rounds old."""
        return [
            client
            for client, past in self.rows().items()
            if 1 <= round_number - past.round <= window
        ]

    def keep_blocks(self, blocks: int) -> None:
        """Store products in this many blocks: one per layer, or one for the model.

        A change of the number deletes the stored products.
        """
        if blocks != self._products.layers:
            self._products = PairProducts(blocks)

    def products(self, clients: Sequence[str]) -> Matrix:
        """Return the inner products of these clients' rows, of shape (blocks, rows, rows).

        The products of each pair are computed once.
        """
        multiplied = self._products.complete(clients)
        stored = set(multiplied)
        new = [client for client in clients if client not in stored]
        if new:
            per_layer = self._products.layers == len(self.layers)
            engine = GramEngine(self.layers, detail=Detail.LAYERS if per_layer else Detail.WHOLE)
            engine.adopt(
                {client: self.row(client) for client in multiplied}, self._products.of(multiplied)
            )
            engine.extend({client: self.row(client) for client in new})
            self.learn(clients, engine.gram(clients))
        return self._products.of(clients)

    def learn(self, clients: Sequence[str], gram: Gram) -> None:
        """Store inner products that were computed elsewhere on the very same rows."""
        self._products.store(clients, gram.blocks)


class InMemoryRows:
    """Stores rows in the memory of the process."""

    def put(self, past: PastRow, row: Row, exponent: int = 0) -> Row:
        """Return the row itself: the history refers to it."""
        return row

    def drop(self, past: PastRow) -> None:
        """Do nothing: the history drops its reference."""

    def stored(self) -> Iterable[tuple[PastRow, ScaledRow]]:
        """Return no row: memory does not outlive the process."""
        return ()
