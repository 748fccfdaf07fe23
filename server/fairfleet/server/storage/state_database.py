"""The database of a state directory: its schema, its transactions and the table `meta`.

By default it is a SQLite file in the directory; with a URL it is a PostgreSQL database. `Database`
opens and locks both. This module brings the tables up to date, and turns a damaged database into
an error that says what to do.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from pydantic import ValidationError
from sqlalchemy.engine import Connection

from fairfleet.common.errors import StateDirError
from fairfleet.server.storage import crash_points
from fairfleet.server.storage.database import FILE, Database
from fairfleet.server.storage.files.tensor_files import TensorFiles
from fairfleet.server.storage.migrations import MIGRATIONS
from fairfleet.server.storage.queries import Write
from fairfleet.server.storage.schema import SCHEMA_VERSION, meta, metadata

log = logging.getLogger(__name__)


class StateDatabase:
    """An open state directory: its database and its tensor files, locked until `close`."""

    def __init__(
        self,
        folder: Path,
        database: str | None = None,
        *,
        schema: str | None = None,
        migrate: bool = True,
    ) -> None:
        """Open a directory; create it or bring it up to date if `migrate` is set.

        `database` is a URL; None keeps the database in the directory. `schema` is the schema in
        that database, None the default one. Raises StateDirError if the directory or the database
        cannot be used; then nothing was changed.
        """
        self.folder, self._url = folder, database
        self._may_migrate = migrate
        self.files = TensorFiles(folder)
        with self.explained():
            self._database = Database(folder, database, schema, create=migrate)
        self._engine = self._database.engine
        try:
            with self.explained():
                self._database.check(thoroughly=not migrate)
                if migrate:
                    self._refuse_other_database()
                self._prepare_schema()
                self._match_directory()
                if migrate:
                    self.files.make_folders()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the database and release the locks."""
        self._database.close()

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Turn errors of a database that cannot be read into a StateDirError that names it."""
        try:
            yield
        except sa.exc.DatabaseError as error:
            if self._url is not None:
                reason = str(error.orig).strip()
                raise StateDirError(f"the database cannot be used: {reason}") from error
            raise StateDirError(
                f"{self.folder / FILE} cannot be read as a database: {error.orig}. Restore it "
                "from a backup, or start anew in another --state-dir; nothing was changed."
            ) from error
        except (json.JSONDecodeError, ValidationError) as error:
            name = "the database" if self._url else self.folder / FILE
            raise StateDirError(
                f"{name} is damaged: a row of it cannot be understood ({error}). "
                "Restore it from a backup; nothing was changed."
            ) from error

    # ---- queries and transactions --------------------------------------------------------------

    def rows(
        self, query: sa.Select[Any], parameters: Mapping[str, Any] | None = None
    ) -> Sequence[sa.Row[*tuple[Any, ...]]]:
        """Return all rows of a query."""
        with self._engine.connect() as connection:
            return connection.execute(query, parameters).all()

    def scalars(self, query: sa.Select[Any]) -> Sequence[Any]:
        """Return the first column of all rows of a query."""
        with self._engine.connect() as connection:
            return connection.scalars(query).all()

    def scalar(self, query: sa.Select[Any]) -> Any:
        """Return the first value of a query, or None without a row."""
        with self._engine.connect() as connection:
            return connection.scalar(query)

    def write(self, *writes: Write) -> None:
        """Carry out writes that belong to no event of a round, in one transaction."""
        self._write(*writes, name="transaction")

    def _write(self, *writes: Write, name: str) -> None:
        """Carry out writes in one transaction; `name` is that of the crash point after it."""
        with self._engine.begin() as connection:
            for write in writes:
                write(connection)
        crash_points.passed(name)

    def get_meta(self, key: str) -> str | None:
        """Return a value of the table `meta`."""
        value: str | None = self.scalar(sa.select(meta.c.value).where(meta.c.key == key))
        return value

    # ---- opening -------------------------------------------------------------------------------

    def _refuse_other_database(self) -> None:
        """Refuse an empty database for a directory that has the models of a federation.

        A new federation would delete them. If its own creation was interrupted, a separate database
        has the directory recorded, and a database in the directory is beside version 0 alone.
        """
        keys = ("signature", "directory") if self._has_tables() else ()
        if any(self.get_meta(key) is not None for key in keys) or not self.files.has_models():
            return
        if self._database.elsewhere:
            raise StateDirError(
                f"{self.folder} has the models of a federation, but database "
                f"{self._database.name} has no federation. Give the --database and the "
                "database_schema that were used with this directory; for a new federation, give a "
                "new --state-dir. Nothing was deleted."
            )
        if self._database.has_mark:
            raise StateDirError(
                f"{self.folder} has the models of a federation whose database is elsewhere. Give "
                "its --database, and its database_schema if it had one; for a new federation, give "
                "a new --state-dir. Nothing was deleted."
            )
        if self.files.has_models(after_the_first=True):
            raise StateDirError(
                f"{self.folder} has the models of a federation, but {FILE} has no federation. "
                "Restore it from a backup, or start anew in another --state-dir. Nothing was "
                "deleted."
            )

    def _has_tables(self) -> bool:
        return sa.inspect(self._engine).has_table("meta")

    def _prepare_schema(self) -> None:
        """Create the tables of a new directory; migrate those of an older one."""
        if not self._has_tables() or not self.get_meta("schema_version"):
            self._create_tables()
        version = int(self.get_meta("schema_version") or 0)
        self._check_version(version)
        for earlier in range(version, SCHEMA_VERSION):
            self._migrate(earlier)

    def _create_tables(self) -> None:
        if not self._may_migrate:
            raise StateDirError(f"{self.folder} holds no federation: it has no tables yet")
        metadata.create_all(self._engine)
        self._write(
            meta_write("schema_version", str(SCHEMA_VERSION)), name="transaction of new tables"
        )

    def _check_version(self, version: int) -> None:
        """Refuse a newer directory, and an older one if it must not be migrated."""
        if version > SCHEMA_VERSION or version < min(MIGRATIONS):
            raise StateDirError(
                f"{self.folder} has schema version {version}; this server reads version "
                f"{SCHEMA_VERSION}. Use the server version that wrote it, or another state "
                "directory; nothing was changed."
            )
        if version < SCHEMA_VERSION and not self._may_migrate:
            raise StateDirError(
                f"{self.folder} has schema version {version}, older than this server's "
                f"{SCHEMA_VERSION}. Start the server on it once: it migrates it."
            )

    def _migrate(self, version: int) -> None:
        """Bring the tables from a version to the next one."""
        self._write(
            lambda connection: MIGRATIONS[version](connection, self.folder),
            meta_write("schema_version", str(version + 1)),
            name=f"transaction of the migration from schema version {version}",
        )
        log.info("%s: schema version %d is now %d", self.folder, version, version + 1)

    def _match_directory(self) -> None:
        """Refuse a directory and a separate database of different federations."""
        if not self._database.elsewhere:
            return
        directory, recorded = self._database.mark(), self.get_meta("directory")
        if recorded is None and self._may_migrate:
            self._write(
                meta_write("directory", directory), name="transaction of the directory's mark"
            )
        elif recorded is not None and directory != recorded:
            raise StateDirError(
                f"{self.folder} and database {self._database.name} belong to different "
                "federations. Give the --state-dir that was used with this database. For another "
                "federation, give a new --state-dir and a new database, or a schema of its own "
                "with --set database_schema=NAME."
            )


def meta_write(key: str, value: str) -> Write:
    """Set a value of the table `meta`."""

    def write(connection: Connection) -> None:
        connection.execute(meta.delete().where(meta.c.key == key))
        connection.execute(meta.insert().values(key=key, value=value))

    return write
