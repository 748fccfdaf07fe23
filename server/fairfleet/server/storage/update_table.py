"""The table of updates for which the server sent receipts, of all rounds."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Row

from fairfleet.common.reports import TrainReport
from fairfleet.server.storage.queries import Write, writing
from fairfleet.server.storage.schema import updates
from fairfleet.server.storage.state_database import StateDatabase

# Built once: to build a statement takes longer than to execute it.
_INSERT = updates.insert()
_ONE_UPDATE = sa.select(updates).where(
    updates.c.round == sa.bindparam("number"), updates.c.client == sa.bindparam("name")
)


@dataclass(frozen=True)
class StoredUpdate:
    """An update for which the server sent a receipt."""

    round: int
    client: str
    digest: bytes
    codec: str
    size_bytes: int
    report: TrainReport
    file: str | None  # relative to the state directory; None once a model contains the update
    base: bytes | None = None  # digest of the update that it is delta-coded against


class UpdateTable(StateDatabase):
    """The updates of a federation."""

    def update_of(self, client: str, round_number: int) -> StoredUpdate | None:
        """Return one client's update of a round, by the primary key: other rows are not read."""
        rows = self.rows(_ONE_UPDATE, {"number": round_number, "name": client})
        return _stored_update(rows[0]) if rows else None

    def updates_of(self, round_number: int) -> list[StoredUpdate]:
        """Return all updates of a round."""
        rows = self.rows(sa.select(updates).where(updates.c.round == round_number))
        return [_stored_update(row) for row in rows]

    @staticmethod
    def update_write(update: StoredUpdate) -> Write:
        """Record an update."""
        row = {
            "round": update.round,
            "client": update.client,
            "digest": update.digest.hex(),
            "codec": update.codec,
            "size_bytes": update.size_bytes,
            "file": update.file,
            "report": update.report.model_dump_json(),
            "unix_seconds": time.time(),
            "base": update.base.hex() if update.base else None,
        }
        return writing(_INSERT, row)

    @staticmethod
    def withdrawal_write(client: str, round_number: int) -> Write:
        """Delete the update of a client that was revoked while its round collected updates."""
        is_withdrawn = (updates.c.client == client) & (updates.c.round == round_number)
        return writing(updates.delete().where(is_withdrawn))


def committed_updates_write(round_number: int) -> Write:
    """Record that a model contains the updates of a round: their files are not needed any more."""
    return writing(updates.update().where(updates.c.round == round_number).values(file=None))


def _stored_update(row: Row[*tuple[Any, ...]]) -> StoredUpdate:
    return StoredUpdate(
        row.round,
        row.client,
        bytes.fromhex(row.digest),
        row.codec,
        row.size_bytes,
        TrainReport.model_validate_json(row.report),
        row.file,
        bytes.fromhex(row.base) if row.base else None,
    )
