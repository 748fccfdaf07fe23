"""The latest row of every client, with the round whose model it was computed on: absent clients are not forgotten.

Rows live in memory or in memory-mapped files, in float32 or float16. Inner products among them are cached, so that
a new round costs only the products of its own rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal, Protocol
from urllib.parse import quote, unquote

import numpy as np

from fairfleet.server.blocks import Matrix, Row
from fairfleet.server.durable import make_folder, sync
from fairfleet.server.gram import Gram, GramEngine
from fairfleet.server.rules.base import PastRow
from fairfleet.server.sealed import open_row, read_row, save_row

Precision = Literal["float32", "float16", "float64"]


class Shelf(Protocol):
    """Where the rows are kept."""

    def put(self, past: PastRow, row: Row) -> Row: ...

    def drop(self, past: PastRow) -> None: ...

    def stored(self) -> Iterable[tuple[PastRow, Row]]: ...


class History:
    """Rows by client, and their mutual inner products per layer.

    >>> history = History([2])
    >>> history.put("ann", 3, np.array([3, 4], np.float32))
    True
    >>> history.put("ann", 2, np.array([0, 0], np.float32))  # older than what is known
    False
    >>> history.rows()["ann"].round, history.products(["ann"])
    (3, array([[[25.]]]))
    """

    def __init__(self, layers: Sequence[int], shelf: Shelf | None = None, precision: Precision = "float32") -> None:
        self.layers = tuple(layers)
        self.precision: Precision = precision
        self._shelf = shelf or Memory()
        self._rows: dict[str, tuple[PastRow, Row]] = {past.client: (past, row) for past, row in self._shelf.stored()}
        self._products: dict[tuple[str, str], Matrix] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def put(
        self, client: str, round: int, row: Row, *, loss: float | None = None, samples: float | None = None
    ) -> bool:
        """Keeps a copy of the row if it is newer than the client's last. A late update is not lost, an old one is."""
        before = self._rows.get(client)
        if before and before[0].round >= round:
            return False
        past = PastRow(client, round, loss, samples)
        self.install(past, self.write(past, row))
        return True

    def write(self, past: PastRow, row: Row) -> Row:
        """Puts a copy of the row where rows are kept. It is the client's latest only once it is installed."""
        if row.shape != (sum(self.layers),):
            raise ValueError(
                f"row of {past.client!r} has shape {row.shape}; this history holds rows of {sum(self.layers)}"
            )
        return self._shelf.put(past, row.astype(self.precision))

    def install(self, past: PastRow, kept: Row) -> None:
        self._forget(past.client)
        if before := self._rows.get(past.client):
            self._shelf.drop(before[0])
        self._rows[past.client] = (past, kept)

    def discard(self, client: str) -> None:
        """Forgets a client that left for good."""
        if client in self._rows:
            past, _ = self._rows.pop(client)
            self._forget(client)
            self._shelf.drop(past)

    def surplus(self, round: int, *, rounds: int | None = None, size_bytes: int | None = None) -> list[str]:
        """Clients whose rows are older than so many rounds, and the oldest beyond so many bytes."""
        by_age = sorted(self._rows, key=lambda client: (self._rows[client][0].round, client))
        each = sum(self.layers) * np.dtype(self.precision).itemsize
        too_many = len(by_age) - size_bytes // each if size_bytes is not None else 0
        return [
            client
            for at, client in enumerate(by_age)
            if at < too_many or (rounds is not None and round - self._rows[client][0].round > rounds)
        ]

    def rows(self) -> dict[str, PastRow]:
        """Which rows there are, by client id and in its order. May be asked while another thread changes them."""
        kept = self._rows.copy()
        return {client: kept[client][0] for client in sorted(kept)}

    def row(self, client: str) -> Row:
        return self._rows[client][1]

    def within(self, round: int, window: int) -> list[str]:
        """Clients whose row is at least one and at most `window` rounds old."""
        return [client for client, past in self.rows().items() if 1 <= round - past.round <= window]

    def products(self, clients: Sequence[str]) -> Matrix:
        """Inner products of these clients' rows, (layers, rows, rows); computed at most once for each pair."""
        known: list[str] = []
        for client in clients:
            if all(_pair(client, other) in self._products for other in [*known, client]):
                known.append(client)
        fresh = [client for client in clients if client not in set(known)]
        if fresh:
            engine = GramEngine(self.layers)
            engine.adopt({client: self.row(client) for client in known}, self._cached(known))
            engine.extend({client: self.row(client) for client in fresh})
            self.learn(clients, engine.gram(clients))
        return self._cached(clients)

    def learn(self, clients: Sequence[str], gram: Gram) -> None:
        """Remembers inner products that were computed elsewhere on the very same rows."""
        for i, one in enumerate(clients):
            for j, other in enumerate(clients[: i + 1]):
                self._products[_pair(one, other)] = gram.layers[:, i, j].copy()

    def _cached(self, clients: Sequence[str]) -> Matrix:
        out = np.zeros((len(self.layers), len(clients), len(clients)))
        for i, one in enumerate(clients):
            for j, other in enumerate(clients):
                out[:, i, j] = self._products[_pair(one, other)]
        return out

    def _forget(self, client: str) -> None:
        self._products = {pair: value for pair, value in self._products.items() if client not in pair}


def _pair(one: str, other: str) -> tuple[str, str]:
    return (one, other) if one <= other else (other, one)


class Memory:
    """Rows in the memory of the process."""

    def put(self, past: PastRow, row: Row) -> Row:
        return row

    def drop(self, past: PastRow) -> None:
        pass

    def stored(self) -> Iterable[tuple[PastRow, Row]]:
        return ()


class Folder:
    """One memory-mapped file per row: larger than memory, and found again after a restart."""

    def __init__(self, path: Path) -> None:
        self.path = path
        make_folder(path)

    def put(self, past: PastRow, row: Row) -> Row:
        beside = self.path / f".{quote(past.client, safe='')}.part"
        with beside.open("wb") as file:
            save_row(file, row)
            file.flush()
            sync(file.fileno(), beside)
        beside.replace(self._file(past))  # a row is there whole or not at all
        return open_row(self._file(past))

    def drop(self, past: PastRow) -> None:
        self._file(past).unlink(missing_ok=True)

    def stored(self) -> Iterable[tuple[PastRow, Row]]:
        """The newest row of each client; a crash may have left an older one beside it."""
        found = [(self._past(file), file) for file in self.path.glob("*.npy")]
        for past, file in sorted(found, key=lambda pair: pair[0].round):
            yield past, read_row(file)

    def _file(self, past: PastRow) -> Path:
        return self.path / file_name(past)

    def _past(self, file: Path) -> PastRow:
        client, _, round = file.stem.rpartition("@")
        return PastRow(unquote(client), int(round))


def file_name(past: PastRow) -> str:
    return f"{quote(past.client, safe='')}@{past.round}.npy"
