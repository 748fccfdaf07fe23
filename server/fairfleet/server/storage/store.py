"""The store: everything that survives a crash, as one object with one transaction per event.

A transaction names only files that are on the disk already, so the database never names a file
that is incomplete. Only one thread may write; the caller ensures that.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import sqlalchemy as sa
from numpy.typing import NDArray
from sqlalchemy.engine import Connection

from fairfleet.common.tensors import Model, Signature
from fairfleet.server.rounds.serialization import event_to_json, round_from_json, round_to_json
from fairfleet.server.rounds.state_machine import Event, Round
from fairfleet.server.storage import step_queries
from fairfleet.server.storage.history_table import HistoryTable
from fairfleet.server.storage.model_table import (
    ModelTable,
    StoredModel,
    forget_files_write,
    model_write,
)
from fairfleet.server.storage.queries import Write, writing
from fairfleet.server.storage.round_record import RoundRecord
from fairfleet.server.storage.schema import journal, meta, revocations, rounds
from fairfleet.server.storage.state_database import meta_write
from fairfleet.server.storage.update_table import (
    StoredUpdate,
    UpdateTable,
    committed_updates_write,
)

__all__ = ["Fact", "Store", "StoredModel", "StoredUpdate"]

# Built once: to build a statement takes longer than to execute it.
_JOURNAL = journal.insert()
_ROUND = meta.update().where(meta.c.key == "round").values(value=sa.bindparam("now"))

Fact = tuple[Round, Event, Round]  # an event, the round before it and the round after it


class Store(ModelTable, UpdateTable, HistoryTable):
    """One federation's state directory, locked while the store is open."""

    # ---- the federation ------------------------------------------------------------------------

    @property
    def has_federation(self) -> bool:
        """Whether `create` was called."""
        return self.get_meta("signature") is not None

    @property
    def federation(self) -> str:
        """The name of the federation; empty before `create`."""
        return self.get_meta("federation") or ""

    @property
    def federation_id(self) -> str:
        """The UUID that was made with the federation; empty before `create`."""
        return self.get_meta("federation_id") or ""

    def create(
        self,
        name: str,
        model: Model,
        digest: bytes,
        vectors: Mapping[str, NDArray[Any]] | None = None,
    ) -> None:
        """Begin a federation: version 0, with an optimizer's `vectors`, and an idle round."""
        file = self.files.write_model(0, model)
        vectors_file = self.files.write_vectors(0, vectors or {})
        self._write(
            meta_write("federation", name),
            meta_write("federation_id", str(uuid.uuid4())),
            meta_write("signature", model.signature.to_json()),
            meta_write("round", round_to_json(Round(0))),
            model_write(StoredModel(0, digest, file, None, vectors_file)),
            name="transaction of a new federation",
        )

    def signature(self) -> Signature:
        """Return the signature of the federation's model."""
        return Signature.from_json(self.get_meta("signature") or "[]")

    def next_boot(self) -> int:
        """Count this start of a server, and return how many there were."""
        boot = int(self.get_meta("boots") or 0) + 1
        self._write(meta_write("boots", str(boot)), name="transaction of a boot")
        return boot

    # ---- rounds --------------------------------------------------------------------------------

    def current_round(self) -> Round:
        """Return the round under way."""
        return round_from_json(self.get_meta("round") or "")

    def record(self, facts: Sequence[Fact], now: Round, *writes: Write) -> None:
        """Make events, the round after them and further writes durable in one transaction."""
        journal_writes = [_journal_write(facts, now)] if facts else []
        name = f"transaction of a round, now {now.phase.value}"
        self._write(*journal_writes, *writes, name=name)

    def journal(self) -> list[str]:
        """Return every event as JSON, in order."""
        return list(self.scalars(sa.select(journal.c.event).order_by(journal.c.sequence)))

    def records(self, first: int, last: int) -> list[RoundRecord]:
        """Return the records of committed rounds, with what became known later."""
        is_within = rounds.c.round.between(first, last)
        columns = (rounds.c.record, rounds.c.undone_by.is_not(None).label("undone"))
        query = sa.select(*columns).where(is_within).order_by(rounds.c.round)
        records = [
            replace(RoundRecord.from_json(row.record), undone=bool(row.undone))
            for row in self.rows(query)
        ]
        return step_queries.completed(self, records, first, last)

    @staticmethod
    def commit_writes(
        model: StoredModel,
        record: Callable[[], RoundRecord],
        keep: int,
        pinned: Collection[int] = (),
    ) -> Write:
        """Record a round's model and its record.

        The files of the newest `keep` models and of the `pinned` versions are kept.
        `record` is called inside the transaction, so it may wait for the model's files.
        """
        version = model.version

        def write(connection: Connection) -> None:
            model_write(model)(connection)
            values = {"round": version - 1, "record": record().to_json()}
            connection.execute(rounds.insert(), values)
            committed_updates_write(version - 1)(connection)
            forget_files_write(version - keep, pinned)(connection)

        return write

    # ---- revocations ---------------------------------------------------------------------------

    def revoke(self, client: str, reason: str, *writes: Write) -> None:
        """Record that a client was revoked; a new reason replaces an older one.

        Further `writes` are part of the transaction.
        """
        self._write(
            *writes,
            writing(revocations.delete().where(revocations.c.client == client)),
            writing(revocations.insert(), {"client": client, "reason": reason}),
            name="transaction of a revocation",
        )

    def revoked(self) -> dict[str, str]:
        """Return the revoked clients, with the reasons."""
        return {row.client: row.reason for row in self.rows(sa.select(revocations))}


def _journal_write(facts: Sequence[Fact], now: Round) -> Write:
    unix = time.time()
    rows = [
        {"round": before.number, "event": event_to_json(event), "unix_seconds": unix}
        for before, event, _ in facts
    ]

    def write(connection: Connection) -> None:
        connection.execute(_JOURNAL, rows)
        connection.execute(_ROUND, {"now": round_to_json(now)})

    return write
