"""What the modules of queries need of a store: rows of a query, and writes in a transaction.

A `Write` is a function of a connection. The store carries out several of them in one transaction.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import sqlalchemy as sa
from sqlalchemy.engine import Connection

Write = Callable[[Connection], None]


class ReadableStore(Protocol):
    """A store that can be queried."""

    def rows(self, query: sa.Select[Any]) -> Sequence[sa.Row[*tuple[Any, ...]]]:
        """Return all rows of a query."""


class WritableStore(ReadableStore, Protocol):
    """A store that can be queried and written to."""

    def write(self, *writes: Write) -> None:
        """Carry out writes in one transaction."""


def writing(
    statement: sa.Executable, rows: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None
) -> Write:
    """Return the write that executes one statement, for each of the rows if there are any."""

    def write(connection: Connection) -> None:
        connection.execute(statement, rows)

    return write
