"""Updates that made aggregation fail: kept for the operator within limits, and reported to clients.

The round continues without such an update. A row in the database says whose it was and why it was
left out. The stream as it was received stays in the folder `quarantine` of the state directory:
a few files per client, and a limited number of bytes in total. The oldest files are deleted first;
the rows stay.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from fairfleet.server.storage.queries import Write
from fairfleet.server.storage.schema import quarantine, updates
from fairfleet.server.storage.store import Store, StoredUpdate

FILES_PER_CLIENT = 3


@dataclass(frozen=True)
class QuarantinedUpdate:
    """An update that its round was committed without."""

    round: int
    client: str
    digest: bytes
    reason: str
    size_bytes: int
    file: str | None  # relative to the state directory; None if only the row is kept


def keep_files(
    store: Store, left_out: Mapping[str, tuple[StoredUpdate, str]]
) -> tuple[QuarantinedUpdate, ...]:
    """Link the files of these updates into the quarantine; `quarantine_write` must follow."""
    return tuple(
        QuarantinedUpdate(
            update.round,
            client,
            update.digest,
            reason,
            update.size_bytes,
            store.files.quarantine(update.file),
        )
        for client, (update, reason) in left_out.items()
    )


def quarantine_write(rows: Sequence[QuarantinedUpdate], limit_bytes: int) -> Write:
    """Record these updates, and release the oldest files beyond the limits."""

    def write(connection: Connection) -> None:
        if not rows:
            return
        unix = time.time()
        values = [{**asdict(row), "digest": row.digest.hex(), "unix_seconds": unix} for row in rows]
        connection.execute(quarantine.insert(), values)
        for number, client in _surplus(connection, limit_bytes):
            is_surplus = (quarantine.c.round == number) & (quarantine.c.client == client)
            connection.execute(quarantine.update().where(is_surplus).values(file=None))

    return write


def _surplus(connection: Connection, limit_bytes: int) -> list[tuple[int, str]]:
    """Return the rows whose files are beyond the limits; the newest files are kept."""
    query = sa.select(quarantine.c.round, quarantine.c.client, quarantine.c.size_bytes)
    query = query.where(quarantine.c.file.is_not(None)).order_by(
        quarantine.c.round.desc(), quarantine.c.client
    )
    files_of, total, surplus = dict[str, int](), 0, list[tuple[int, str]]()
    for number, client, size_bytes in connection.execute(query):
        files_of[client] = files_of.get(client, 0) + 1
        total += size_bytes
        if files_of[client] > FILES_PER_CLIENT or total > limit_bytes:
            surplus.append((number, client))
    return surplus


def named_files(store: Store) -> set[str]:
    """Return the quarantine's files that the database names."""
    return set(store.scalars(sa.select(quarantine.c.file).where(quarantine.c.file.is_not(None))))


def notices(store: Store) -> dict[str, QuarantinedUpdate]:
    """Return each client's newest quarantined update, unless it is followed by an accepted one."""
    newest = sa.select(updates.c.client, sa.func.max(updates.c.round).label("round")).group_by(
        updates.c.client
    )
    last = newest.subquery()
    query = (
        sa.select(quarantine)
        .join(
            last, sa.and_(last.c.client == quarantine.c.client, last.c.round <= quarantine.c.round)
        )
        .order_by(quarantine.c.round)
    )
    return {
        row.client: QuarantinedUpdate(
            row.round, row.client, bytes.fromhex(row.digest), row.reason, row.size_bytes, row.file
        )
        for row in store.rows(query)
    }
