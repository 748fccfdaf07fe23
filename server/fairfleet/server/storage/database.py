"""Open and lock the database of a federation, so that only one server writes it.

By default the database is a SQLite file in the state directory, which is locked while a server
runs. With a URL it is a PostgreSQL database, and the directory holds only files. The database is
then locked too, and both carry the same mark, so that neither can be used with the other part of
another federation. Several federations can share a PostgreSQL database, each in a schema of its
own; lock and mark are the schema's.
"""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from filelock import lock_descriptor

from fairfleet.common.errors import StateDirError
from fairfleet.common.extras import install_command
from fairfleet.common.pki.private_files import tighten
from fairfleet.server.storage.files.durable_files import make_folder, write_durably

FILE = "federation.db"
MARK = "federation.id"
QUICKLY_CHECKED_BYTES = 256 << 20
# Any number that others are unlikely to use. It locks the schema that is used by default.
ADVISORY_LOCK = 0x0FA1_4F1E_E7
DEFAULT_SCHEMA = "public"


class Database:
    """A connected database and its state directory, both locked for this process until `close`."""

    def __init__(
        self,
        folder: Path,
        url: str | None = None,
        schema: str | None = None,
        *,
        create: bool = True,
    ) -> None:
        """Lock the directory, connect, and lock a separate database; None means SQLite.

        `schema` is a schema of the separate database, which is created if it is missing and
        `create` is set; None means the first one of the search path. Raises StateDirError if
        either cannot be used or is in use by another server.
        """
        self.elsewhere = url is not None
        self._folder, self._schema = folder, schema
        self._resources = ExitStack()
        try:
            self._resources.callback(os.close, _claim(folder))
            self.engine = _engine(url or f"sqlite:///{folder / FILE}", schema)
            self._resources.callback(self.engine.dispose)
            self.name = self.engine.url.render_as_string(hide_password=True)
            if schema:
                self.name = f"{self.name} (schema {schema})"
            if self.elsewhere:
                self._lock(create=create)
        except BaseException:
            self._resources.close()
            raise

    def close(self) -> None:
        """Release the locks and close all connections."""
        self._resources.close()

    def check(self, *, thoroughly: bool) -> None:
        """Raise StateDirError if the SQLite file is damaged; a separate database is not checked.

        Only a thorough check compares indices with their tables and reads a large file: it would
        delay every start.
        """
        file = self._folder / FILE
        if self.elsewhere or not file.exists():
            return
        if not thoroughly and file.stat().st_size > QUICKLY_CHECKED_BYTES:
            return
        pragma = "integrity_check" if thoroughly else "quick_check"
        with self.engine.connect() as connection:
            findings = list(connection.scalars(sa.text(f"PRAGMA {pragma}(10)")))
        if findings != ["ok"]:
            raise StateDirError(
                f"{file} is damaged: {'; '.join(findings)}. "
                "Restore the state directory from a backup; nothing was changed."
            )

    def mark(self) -> str:
        """Return the mark of the directory's federation; the first call writes a random one."""
        file = self._folder / MARK
        if not file.exists():
            write_durably(file, secrets.token_hex(16).encode())
        return file.read_text()

    @property
    def has_mark(self) -> bool:
        """Whether the directory was used with a separate database."""
        return (self._folder / MARK).exists()

    def _lock(self, *, create: bool) -> None:
        connection = self._resources.enter_context(
            self.engine.connect().execution_options(isolation_level="AUTOCOMMIT")
        )
        # A user who may create no schema can use one that exists.
        if self._schema and create and not sa.inspect(connection).has_schema(self._schema):
            connection.execute(sa.schema.CreateSchema(self._schema, if_not_exists=True))
        for lock in _locks(self._schema, connection.scalar(sa.select(sa.func.current_schema()))):
            if not connection.scalar(sa.select(sa.func.pg_try_advisory_lock(lock))):
                raise StateDirError(
                    f"database {self.name} is in use by another server. Stop that one, use "
                    "another database, or give this federation a schema of its own with "
                    "--set database_schema=NAME."
                )


def _locks(schema: str | None, current: str | None) -> list[int]:
    """Return the locks of a schema; `current` is what the database calls the one in use.

    Servers up to 0.1.0 hold the first one, whatever their schema is.
    """
    name = current or schema or DEFAULT_SCHEMA
    digest = hashlib.sha256(f"fairfleet schema {name}".encode()).digest()
    own = int.from_bytes(digest[:8], "big", signed=True)
    return [ADVISORY_LOCK, own] if schema is None or name == DEFAULT_SCHEMA else [own]


def _engine(url: str, schema: str | None) -> sa.Engine:
    try:
        engine = sa.create_engine(url)
    except (sa.exc.ArgumentError, ModuleNotFoundError) as error:
        raise StateDirError(
            f"database {url.partition('@')[2] or url}: {error}. "
            "Give postgresql+psycopg://user:password@host/name, "
            f"and install its driver: {install_command('postgresql')}"
        ) from error
    if engine.dialect.name == "sqlite":
        sa.event.listen(engine, "connect", _configure_sqlite)
    elif engine.dialect.name != "postgresql":
        raise StateDirError(
            f"database kind {engine.dialect.name} is not supported; use postgresql+psycopg://…"
        )
    elif schema:
        sa.event.listen(engine, "connect", _search_path(schema), insert=True)
    return engine


def _search_path(schema: str) -> Callable[[Any, Any], None]:
    """Return what makes a new connection use one schema only."""

    def use_schema(connection: Any, _: Any) -> None:
        connection.execute(f'SET search_path TO "{schema}"')
        connection.commit()  # otherwise the rollback of a transaction would undo it

    return use_schema


def _configure_sqlite(connection: Any, _: Any) -> None:
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute("PRAGMA synchronous=FULL")


def _claim(folder: Path) -> int:
    """Lock the state directory and return the descriptor of its lock file.

    An empty or missing directory becomes a state directory. Raises StateDirError if it has other
    content, cannot be used, or is locked by another server.
    """
    try:
        make_folder(folder, mode=0o700)
        _refuse_foreign(folder)
        tighten(folder)  # A refused directory keeps its permissions.
        descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise StateDirError(
            f"cannot use {folder} as state directory: {error.strerror}. "
            "Give a directory that this user can write to as --state-dir."
        ) from error
    try:
        _lock_file(descriptor, folder)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _refuse_foreign(folder: Path) -> None:
    """Raise StateDirError if a directory has content, but none that a server begins with."""
    names = sorted(path.name for path in folder.iterdir() if path.name != "lock")
    # A power cut can leave a temporary file, whose name begins with that of the final one.
    if names and not any(name.startswith((FILE, MARK)) for name in names):
        raise StateDirError(
            f"{folder} is not a FairFleet state directory: it holds {names[0]!r} and no {FILE}. "
            "Give an empty or new directory as --state-dir."
        )


def _lock_file(descriptor: int, folder: Path) -> None:
    """Lock the open lock file, and write the number of this process to it for a second server.

    The kernel releases the lock however this process ends. Raises StateDirError.
    """
    try:
        locked = lock_descriptor(descriptor, blocking=False)
    except OSError as error:
        raise StateDirError(
            f"cannot lock {folder}: {error.strerror}. Give a directory on a file system with file "
            "locks, such as a local disk, as --state-dir."
        ) from error
    if not locked:
        holder = os.read(descriptor, 32).decode(errors="replace").strip() or "unknown"
        raise StateDirError(
            f"{folder} is in use by another server (process {holder}). "
            "Stop that one, or give this one its own --state-dir."
        )
    os.ftruncate(descriptor, 0)
    os.write(descriptor, str(os.getpid()).encode())
