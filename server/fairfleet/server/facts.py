"""The database as the modules of records see it: queries in, rows out, and writes that share a transaction."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import sqlalchemy as sa
from sqlalchemy.engine import Connection

Write = Callable[[Connection], None]


class Facts(Protocol):
    """The store, as far as records need it."""

    def rows(self, query: sa.Select[Any]) -> Sequence[sa.Row[*tuple[Any, ...]]]: ...


class WritableFacts(Facts, Protocol):
    def write(self, *writes: Write) -> None: ...


def writing(statement: sa.Executable, rows: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None) -> Write:
    """One statement, to be carried out in a transaction."""

    def write(connection: Connection) -> None:
        connection.execute(statement, rows)

    return write
