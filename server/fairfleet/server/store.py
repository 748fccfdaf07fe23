"""What survives: a database of facts (SQLite in WAL mode, or any that SQLAlchemy speaks), and `tensor_files` beside it.

A fact is one transaction, and names only files that are already on the disk, so the database never
speaks of a file that is not whole. One thread writes; the caller sees to that.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from numpy.typing import NDArray
from pydantic import ValidationError
from sqlalchemy.engine import Connection

from fairfleet.common.errors import StateDirError
from fairfleet.common.reports import TrainReport
from fairfleet.common.tensors import Model, Signature
from fairfleet.server import descent_records, faults
from fairfleet.server.database import FILE, Database
from fairfleet.server.facts import Write, writing
from fairfleet.server.journal import event_to_json, round_from_json, round_to_json
from fairfleet.server.migrations import MIGRATIONS
from fairfleet.server.rounds import Event, Round
from fairfleet.server.rules.base import PastRow
from fairfleet.server.schema import (
    SCHEMA_VERSION,
    history,
    journal,
    meta,
    metadata,
    models,
    revocations,
    rounds,
    updates,
)
from fairfleet.server.tensor_files import TensorFiles

log = logging.getLogger(__name__)

# Made once: building a statement anew costs more than carrying it out.
_JOURNAL = journal.insert()
_UPDATE = updates.insert()
_FORGET = history.delete().where(history.c.client == sa.bindparam("whose"), history.c.round == sa.bindparam("number"))
_ROUND = meta.update().where(meta.c.key == "round").values(value=sa.bindparam("now"))

Fact = tuple[Round, Event, Round]  # an event, the round it met, and the round it led to


@dataclass(frozen=True)
class StoredUpdate:
    """An update that was given a receipt."""

    round: int
    client: str
    digest: bytes
    codec: str
    size_bytes: int
    report: TrainReport
    file: str | None
    base: bytes | None = None  # digest of the update that it is told by


@dataclass(frozen=True)
class StoredModel:
    """A committed version: where its file lies, relative to the state directory, and what goes with it."""

    version: int
    digest: bytes
    file: str
    rule_state: str | None = None
    vectors_file: str | None = None


class Store:
    """One federation's state directory, locked for as long as the store is open."""

    def __init__(self, folder: Path, database: str | None = None, *, migrate: bool = True) -> None:
        """`database` is the URL of one elsewhere; else the facts are in the directory, too."""
        self.folder = folder
        self._may_migrate, self._elsewhere = migrate, database
        self.files = TensorFiles(folder)
        with _explained(folder, database):
            self._database = Database(folder, database)
        self._engine = self._database.engine
        try:
            with _explained(folder, database):
                self._database.check(thoroughly=not migrate)
                self._take_up_schema()
                self._match_directory()
                if migrate:
                    self.files.make_folders()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._database.close()

    def explained(self) -> AbstractContextManager[None]:
        """Round whatever reads many facts: what cannot be read is said to be damaged, and where."""
        return _explained(self.folder, self._elsewhere)

    def rows(self, query: sa.Select[Any]) -> Sequence[sa.Row[*tuple[Any, ...]]]:
        """Facts, as they stand."""
        with self._reading() as connection:
            return connection.execute(query).all()

    @contextmanager
    def _reading(self) -> Iterator[Connection]:
        with self._engine.connect() as connection:
            yield connection

    def _take_up_schema(self) -> None:
        """Makes a new directory's tables, and brings an older one's up to date; a newer one is left alone."""
        if not sa.inspect(self._engine).has_table("meta") or self._get("schema_version") is None:
            if not self._may_migrate:
                raise StateDirError(f"{self.folder} holds no federation: its tables were never made")
            metadata.create_all(self._engine)
            with self._engine.begin() as connection:
                _put(connection, "schema_version", str(SCHEMA_VERSION))
            faults.passed("transaction of new tables")
        found = int(self._get("schema_version") or 0)
        if found > SCHEMA_VERSION or found < min(MIGRATIONS):
            raise StateDirError(
                f"{self.folder} has schema version {found}; this server reads version {SCHEMA_VERSION}. "
                "Use the server version that wrote it, or another state directory; nothing was changed."
            )
        if found < SCHEMA_VERSION and not self._may_migrate:
            raise StateDirError(
                f"{self.folder} has schema version {found}, older than this server's {SCHEMA_VERSION}. "
                "Start the server on it once: it migrates it."
            )
        for version in range(found, SCHEMA_VERSION):
            with self._engine.begin() as connection:
                MIGRATIONS[version](connection, self.folder)
                _put(connection, "schema_version", str(version + 1))
            faults.passed(f"transaction of the migration from schema version {version}")
            log.info("%s: schema version %d is now %d", self.folder, version, version + 1)

    def _match_directory(self) -> None:
        """Files here and facts elsewhere must be of the same federation."""
        if not self._database.elsewhere:
            return
        here, there = self._database.mark(), self._get("directory")
        if there is None and self._may_migrate:
            with self._engine.begin() as connection:
                _put(connection, "directory", here)
            faults.passed("transaction of the directory's mark")
        elif there is not None and here != there:
            raise StateDirError(
                f"{self.folder} and database {self._database.name} belong to different federations. "
                "Give the --state-dir that was used with this database, or a new one and a new database."
            )

    def _get(self, key: str) -> str | None:
        with self._reading() as connection:
            return connection.scalar(sa.select(meta.c.value).where(meta.c.key == key))

    # ---- the federation ------------------------------------------------------------------------

    @property
    def has_federation(self) -> bool:
        return self._get("signature") is not None

    def create(self, name: str, model: Model, digest: bytes, vectors: Mapping[str, NDArray[Any]] | None = None) -> None:
        """The beginning: version 0 and a round that waits for clients. The vectors are kept with the model."""
        file, vectors_file = self.files.write_model(0, model), self.files.write_vectors(0, vectors or {})
        with self._engine.begin() as connection:
            _put(connection, "federation", name)
            _put(connection, "signature", model.signature.to_json())
            _put(connection, "round", round_to_json(Round(0)))
            _name_model(connection, StoredModel(0, digest, file, None, vectors_file))
        faults.passed("transaction of a new federation")

    @property
    def federation(self) -> str:
        return self._get("federation") or ""

    def began_unix(self) -> float:
        """When the federation was made."""
        with self._reading() as connection:
            began = connection.scalar(sa.select(models.c.unix_seconds).where(models.c.version == 0))
        return float(began or 0.0)

    def signature(self) -> Signature:
        return Signature.from_json(self._get("signature") or "[]")

    def next_boot(self) -> int:
        """How often a server was started here, this time included."""
        with self._engine.begin() as connection:
            boot = int(connection.scalar(sa.select(meta.c.value).where(meta.c.key == "boots")) or 0) + 1
            _put(connection, "boots", str(boot))
        faults.passed("transaction of a boot")
        return boot

    # ---- rounds --------------------------------------------------------------------------------

    def current_round(self) -> Round:
        return round_from_json(self._get("round") or "")

    def record(self, facts: Sequence[Fact], now: Round, *writes: Write) -> None:
        """Makes events, the round that they led to, and what goes with them durable, all at once."""
        unix = time.time()
        rows = [{"round": r.number, "event": event_to_json(e), "unix_seconds": unix} for r, e, _ in facts]
        with self._engine.begin() as connection:
            if rows:
                connection.execute(_JOURNAL, rows)
                connection.execute(_ROUND, {"now": round_to_json(now)})
            for write in writes:
                write(connection)
        faults.passed(f"transaction of a round, now {now.phase.value}")

    def write(self, *writes: Write) -> None:
        """Facts that belong to no event of a round, all at once."""
        with self._engine.begin() as connection:
            for write in writes:
                write(connection)
        faults.passed("transaction")

    def update_write(self, update: StoredUpdate) -> Write:
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
        return writing(_UPDATE, row)

    def history_write(self, kept: Sequence[StoredUpdate], forgotten: Sequence[PastRow] = ()) -> Write:
        """Names the rows that stand for their clients from now on, if they are newer than those that did.

        What is forgotten are these very rows: a newer one of the same client may have come meanwhile.
        """
        rows: list[dict[str, Any]] = [
            {
                "client": update.client,
                "round": update.round,
                "digest": update.digest.hex(),
                "loss": update.report.loss_before,
                "samples": update.report.samples,
            }
            for update in kept
        ]
        clients = [update.client for update in kept]

        def write(connection: Connection) -> None:
            if not rows and not forgotten:
                return
            known = sa.select(history.c.client, history.c.round).where(history.c.client.in_(clients))
            rounds_of = {row.client: row.round for row in connection.execute(known)}
            newer = [row for row in rows if rounds_of.get(row["client"], -1) < row["round"]]
            if forgotten:
                connection.execute(_FORGET, [{"whose": past.client, "number": past.round} for past in forgotten])
            if newer:
                connection.execute(history.delete().where(history.c.client.in_([row["client"] for row in newer])))
                connection.execute(history.insert(), newer)

        return write

    def history_rows(self) -> list[PastRow]:
        query = sa.select(history.c.client, history.c.round, history.c.loss, history.c.samples)
        with self._reading() as connection:
            return [PastRow(*row) for row in connection.execute(query)]

    def history_digest(self, client: str, round_number: int) -> bytes | None:
        """Of the update that stands for the client, if it was computed in this round."""
        query = sa.select(history.c.digest).where(history.c.client == client, history.c.round == round_number)
        with self._reading() as connection:
            digest = connection.scalar(query)
        return bytes.fromhex(digest) if digest else None

    def model_digest(self, version: int) -> bytes | None:
        """Of any version that was ever committed, kept or not."""
        with self._reading() as connection:
            digest = connection.scalar(sa.select(models.c.digest).where(models.c.version == version))
        return bytes.fromhex(digest) if digest else None

    def commit_writes(self, model: StoredModel, record: dict[str, Any], keep: int) -> Write:
        """The facts of a committed round: its model, its record, and which model files are no longer kept."""
        version, gone = model.version, {"file": None, "vectors_file": None}

        def write(connection: Connection) -> None:
            _name_model(connection, model)
            connection.execute(rounds.insert().values(round=version - 1, record=json.dumps(record)))
            connection.execute(updates.update().where(updates.c.round == version - 1).values(file=None))
            connection.execute(models.update().where(models.c.version <= version - keep).values(gone))

        return write

    def updates_of(self, round_number: int) -> list[StoredUpdate]:
        with self._reading() as connection:
            rows = connection.execute(sa.select(updates).where(updates.c.round == round_number)).mappings().all()
        return [
            StoredUpdate(
                row["round"],
                row["client"],
                bytes.fromhex(row["digest"]),
                row["codec"],
                row["size_bytes"],
                TrainReport.model_validate_json(row["report"]),
                row["file"],
                bytes.fromhex(row["base"]) if row["base"] else None,
            )
            for row in rows
        ]

    def update_of(self, client: str, round_number: int) -> StoredUpdate | None:
        return next((update for update in self.updates_of(round_number) if update.client == client), None)

    def records(self, first: int, last: int) -> list[dict[str, Any]]:
        """Of committed rounds, with what became known of them later."""
        query = sa.select(rounds.c.record).where(rounds.c.round.between(first, last)).order_by(rounds.c.round)
        with self._reading() as connection:
            found = [json.loads(record) for record in connection.scalars(query)]
        return descent_records.completed(self, found, first, last)

    # ---- models --------------------------------------------------------------------------------

    def model(self, version: int) -> StoredModel | None:
        """What is known of a version; None where it is not kept."""
        query = sa.select(models).where(models.c.version == version, models.c.file.is_not(None))
        with self._reading() as connection:
            row = connection.execute(query).one_or_none()
        if row is None:
            return None
        return StoredModel(version, bytes.fromhex(row.digest), row.file, row.rule_state, row.vectors_file)

    def kept_models(self) -> list[StoredModel]:
        query = sa.select(models).where(models.c.file.is_not(None)).order_by(models.c.version)
        with self._reading() as connection:
            rows = connection.execute(query).all()
        return [StoredModel(r.version, bytes.fromhex(r.digest), r.file, r.rule_state, r.vectors_file) for r in rows]

    def model_digests(self) -> dict[int, bytes]:
        """Of every version that was ever committed, kept or not."""
        with self._reading() as connection:
            return {r.version: bytes.fromhex(r.digest) for r in connection.execute(sa.select(models))}

    def journal(self) -> list[str]:
        """Every event, in order."""
        with self._reading() as connection:
            return list(connection.scalars(sa.select(journal.c.event).order_by(journal.c.sequence)))

    def named_files(self) -> set[str]:
        """Of the models that are kept, with what goes with them."""
        with self._reading() as connection:
            kept = connection.execute(sa.select(models.c.file, models.c.vectors_file)).all()
        return {file for row in kept for file in row if file is not None}

    # ---- revocations ---------------------------------------------------------------------------

    def revoke(self, client: str, reason: str) -> None:
        with self._engine.begin() as connection:
            connection.execute(revocations.delete().where(revocations.c.client == client))
            connection.execute(revocations.insert().values(client=client, reason=reason))
        faults.passed("transaction of a revocation")

    def revoked(self) -> dict[str, str]:
        with self._reading() as connection:
            return {row.client: row.reason for row in connection.execute(sa.select(revocations))}


def _name_model(connection: Connection, model: StoredModel) -> None:
    row = {**asdict(model), "digest": model.digest.hex(), "unix_seconds": time.time()}
    connection.execute(models.insert(), row)


@contextmanager
def _explained(folder: Path, database: str | None) -> Iterator[None]:
    try:
        yield
    except sa.exc.DatabaseError as error:
        if database is not None:
            raise StateDirError(f"the database cannot be used: {str(error.orig).strip()}") from error
        raise StateDirError(
            f"{folder / FILE} cannot be read as a database: {error.orig}. "
            "Restore it from a backup, or start anew in another --state-dir; nothing was changed."
        ) from error
    except (json.JSONDecodeError, ValidationError) as error:
        raise StateDirError(
            f"{'the database' if database else folder / FILE} is damaged: it holds a fact that cannot be understood "
            f"({error}). Restore it from a backup; nothing was changed."
        ) from error


def _put(connection: Connection, key: str, value: str) -> None:
    connection.execute(meta.delete().where(meta.c.key == key))
    connection.execute(meta.insert().values(key=key, value=value))
