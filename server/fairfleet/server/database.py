"""Where a federation's facts are kept, and that one server alone writes them.

By default a SQLite file in the state directory, which is locked while a server runs. With a URL the facts are in a
PostgreSQL database and only files are in the directory; the database is locked too, and both carry the same mark, so
that neither can be paired with another federation's.
"""

from __future__ import annotations

import fcntl
import os
import secrets
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from fairfleet.common.errors import StateDirError
from fairfleet.common.private_files import tighten
from fairfleet.server.durable import make_folder, write_durably

FILE = "federation.db"
MARK = "federation.id"
QUICKLY_CHECKED_BYTES = 256 << 20
ADVISORY_LOCK = 0x0FA1_4F1E_E7  # any number that others are unlikely to use


class Database:
    def __init__(self, folder: Path, url: str | None = None) -> None:
        self.elsewhere = url is not None
        self._folder = folder
        self._held = ExitStack()
        try:
            self._held.callback(os.close, _claim(folder))
            self.engine = _engine(url or f"sqlite:///{folder / FILE}")
            self._held.callback(self.engine.dispose)
            self.name = self.engine.url.render_as_string(hide_password=True)
            if self.elsewhere:
                self._lock()
        except BaseException:
            self._held.close()
            raise

    def close(self) -> None:
        self._held.close()

    def check(self, *, thoroughly: bool) -> None:
        """Refuses a damaged file of facts; a database elsewhere looks after itself.

        Not thoroughly, indices are not compared with their tables, and a large file is left to `--check`: this would
        delay every start.
        """
        file = self._folder / FILE
        if self.elsewhere or not file.exists() or not (thoroughly or file.stat().st_size <= QUICKLY_CHECKED_BYTES):
            return
        pragma = "integrity_check" if thoroughly else "quick_check"
        with self.engine.connect() as connection:
            found = list(connection.scalars(sa.text(f"PRAGMA {pragma}(10)")))
        if found != ["ok"]:
            raise StateDirError(
                f"{file} is damaged: {'; '.join(found)}. "
                "Restore the state directory from a backup; nothing was changed."
            )

    def mark(self) -> str:
        """What the directory says of the federation that its files belong to; made the first time."""
        file = self._folder / MARK
        if not file.exists():
            write_durably(file, _write_mark)
        return file.read_text()

    def _lock(self) -> None:
        connection = self._held.enter_context(self.engine.connect().execution_options(isolation_level="AUTOCOMMIT"))
        if not connection.scalar(sa.select(sa.func.pg_try_advisory_lock(ADVISORY_LOCK))):
            raise StateDirError(f"database {self.name} is in use by another server. Stop that one, or use another.")


def _engine(url: str) -> sa.Engine:
    try:
        engine = sa.create_engine(url)
    except (sa.exc.ArgumentError, ModuleNotFoundError) as error:
        raise StateDirError(
            f"database {url.partition('@')[2] or url}: {error}. Give postgresql+psycopg://user:password@host/name, "
            "and install it with pip install 'fairfleet[postgresql]'."
        ) from error
    if engine.dialect.name == "sqlite":
        sa.event.listen(engine, "connect", _configure_sqlite)
    elif engine.dialect.name != "postgresql":
        raise StateDirError(f"a database of kind {engine.dialect.name} is not supported; use postgresql+psycopg://…")
    return engine


def _write_mark(file: Path) -> None:
    file.write_text(secrets.token_hex(16))


def _configure_sqlite(connection: Any, _: Any) -> None:
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute("PRAGMA synchronous=FULL")


def _claim(folder: Path) -> int:
    """Takes the state directory for this process alone; refuses one that is somebody else's."""
    try:
        make_folder(folder, mode=0o700)
        foreign = [path.name for path in folder.iterdir() if path.name != "lock"]
        if foreign and not any(name.startswith((FILE, MARK)) for name in foreign):  # or what a cut left beside them
            raise StateDirError(
                f"{folder} is not a FairFleet state directory: it holds {sorted(foreign)[0]!r} and no {FILE}. "
                "Give an empty or new directory as --state-dir."
            )
        tighten(folder)  # only now: a foreign one is left as it is
        descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise StateDirError(
            f"cannot use {folder} as state directory: {error.strerror}. "
            "Give a directory that this user can write to as --state-dir."
        ) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        holder = os.read(descriptor, 32).decode(errors="replace").strip() or "unknown"
        os.close(descriptor)
        raise StateDirError(
            f"{folder} is in use by another server (process {holder}). Stop that one, or give this one "
            "its own --state-dir."
        ) from None
    os.ftruncate(descriptor, 0)
    os.write(descriptor, str(os.getpid()).encode())
    return descriptor
