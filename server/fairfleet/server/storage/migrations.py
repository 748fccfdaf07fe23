"""Bring the database of an older state directory up to date, one schema version at a time.

A migration is plain SQL: the tables as they are defined today do not fit an older version. Its
rows and the new version number are committed in one transaction. A server can die between two
statements, and SQLite commits a CREATE or ALTER that precedes the first row at once. Each migration
can therefore be repeated: it only adds what is missing.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable
from pathlib import Path
from urllib.parse import unquote

import sqlalchemy as sa
from sqlalchemy.engine import Connection

Migration = Callable[[Connection, Path], None]


def list_history_rows(connection: Connection, folder: Path) -> None:
    """1 -> 2: list the rows of the history in the database.

    In version 1 every file in the folder counted. Only rows of committed rounds are listed.
    """
    connection.execute(
        sa.text(
            "CREATE TABLE IF NOT EXISTS history (client TEXT NOT NULL PRIMARY KEY, "
            "round INTEGER NOT NULL, digest TEXT NOT NULL, loss FLOAT NOT NULL, "
            "samples FLOAT NOT NULL)"
        )
    )
    select = sa.text("SELECT digest, report FROM updates WHERE client = :client AND round = :round")
    insert = sa.text("INSERT INTO history VALUES (:client, :round, :digest, :loss, :samples)")
    for client, round_number in _newest_history_files(folder / "history").items():
        key = {"client": client, "round": round_number}
        update = connection.execute(select, key).one_or_none()
        if update is not None:
            report = json.loads(update.report)
            values = {"loss": report["loss_before"], "samples": report["samples"]}
            connection.execute(insert, key | values | {"digest": update.digest})


def _newest_history_files(folder: Path) -> dict[str, int]:
    """Return the newest round of each client's files, which are named CLIENT@ROUND.npy."""
    newest: dict[str, int] = {}
    for file in folder.glob("*@*.npy"):
        quoted_name, _, round_text = file.stem.rpartition("@")
        client = unquote(quoted_name)
        newest[client] = max(newest.get(client, -1), int(round_text))
    return newest


def add_step_measurements(connection: Connection, folder: Path) -> None:
    """2 -> 3: add tables for step verification, measured improvement and cut-off clients."""
    for table in (
        "trials (round INTEGER NOT NULL, client TEXT NOT NULL, step TEXT NOT NULL, losses TEXT, "
        "failure TEXT NOT NULL, unix_seconds FLOAT NOT NULL, PRIMARY KEY (round, client, step))",
        "measures (round INTEGER NOT NULL PRIMARY KEY, improved FLOAT NOT NULL, "
        "clients INTEGER NOT NULL)",
        "cut_off (round INTEGER NOT NULL, client TEXT NOT NULL, loss_before FLOAT, "
        "round_before INTEGER, loss_after FLOAT, round_after INTEGER, "
        "PRIMARY KEY (round, client))",
    ):
        connection.execute(sa.text(f"CREATE TABLE IF NOT EXISTS {table}"))


def index_cut_off_clients(connection: Connection, folder: Path) -> None:
    """3 -> 4: index the cut-off clients, so that a returning one is found without a full scan."""
    connection.execute(
        sa.text("CREATE INDEX IF NOT EXISTS cut_off_by_client ON cut_off (client, loss_after)")
    )


def add_enrolment_tokens(connection: Connection, folder: Path) -> None:
    """4 -> 5: add tables for enrolment tokens and revoked operators."""
    for table in (
        "revoked_operators (name TEXT NOT NULL PRIMARY KEY, reason TEXT)",
        "tokens (client TEXT NOT NULL PRIMARY KEY, digest TEXT NOT NULL, "
        "expires_unix FLOAT NOT NULL, certificate_seconds FLOAT NOT NULL, used_by TEXT)",
    ):
        connection.execute(sa.text(f"CREATE TABLE IF NOT EXISTS {table}"))


def add_update_bases(connection: Connection, folder: Path) -> None:
    """5 -> 6: record which earlier update an update is delta-coded against."""
    if "base" not in {column["name"] for column in sa.inspect(connection).get_columns("updates")}:
        connection.execute(sa.text("ALTER TABLE updates ADD COLUMN base TEXT"))


def add_quarantine(connection: Connection, folder: Path) -> None:
    """6 -> 7: add a table for quarantined updates, which made aggregation fail."""
    connection.execute(
        sa.text(
            "CREATE TABLE IF NOT EXISTS quarantine (round INTEGER NOT NULL, client TEXT NOT NULL, "
            "digest TEXT NOT NULL, reason TEXT NOT NULL, size_bytes INTEGER NOT NULL, file TEXT, "
            "unix_seconds FLOAT NOT NULL, PRIMARY KEY (round, client))"
        )
    )


def add_federation_records(connection: Connection, folder: Path) -> None:
    """7 -> 8: give the federation an id; add tables for clients, audit, settings, own evaluations.

    A round gets a column that says whether it was undone, and the losses of clients that were cut
    off get columns that say how they were measured.
    """
    for table in (
        "clients (client TEXT NOT NULL PRIMARY KEY, software TEXT NOT NULL, "
        "features TEXT NOT NULL, retired TEXT, unix_seconds FLOAT NOT NULL)",
        "audit (sequence INTEGER NOT NULL PRIMARY KEY, unix_seconds FLOAT NOT NULL, "
        "operator TEXT NOT NULL, action TEXT NOT NULL, arguments TEXT NOT NULL, "
        "result TEXT NOT NULL)",
        "settings_history (sequence INTEGER NOT NULL PRIMARY KEY, digest TEXT NOT NULL, "
        "settings TEXT NOT NULL, unix_seconds FLOAT NOT NULL)",
        "server_evaluations (version INTEGER NOT NULL PRIMARY KEY, evaluation TEXT, "
        "failure TEXT NOT NULL, seconds FLOAT NOT NULL, unix_seconds FLOAT NOT NULL)",
    ):
        connection.execute(sa.text(f"CREATE TABLE IF NOT EXISTS {table}"))
    for name, column, kind in (
        ("rounds", "undone_by", "INTEGER"),
        ("cut_off", "measurement_before", "TEXT"),
        ("cut_off", "measurement_after", "TEXT"),
    ):
        columns = {existing["name"] for existing in sa.inspect(connection).get_columns(name)}
        if column not in columns:
            connection.execute(sa.text(f"ALTER TABLE {name} ADD COLUMN {column} {kind}"))
    connection.execute(sa.text("DELETE FROM meta WHERE key = 'federation_id'"))
    connection.execute(
        sa.text("INSERT INTO meta VALUES ('federation_id', :id)"), {"id": str(uuid.uuid4())}
    )


def add_strict_improvement(connection: Connection, folder: Path) -> None:
    """8 -> 9: record the share of clients whose loss fell beside that of which it did not rise.

    Older rows keep what they have: the share of the clients whose loss fell, as `improved`.
    """
    columns = {column["name"] for column in sa.inspect(connection).get_columns("measures")}
    if "strictly_improved" not in columns:
        connection.execute(sa.text("ALTER TABLE measures ADD COLUMN strictly_improved FLOAT"))


# The migration from each version to the next.
MIGRATIONS: dict[int, Migration] = {
    1: list_history_rows,
    2: add_step_measurements,
    3: index_cut_off_clients,
    4: add_enrolment_tokens,
    5: add_update_bases,
    6: add_quarantine,
    7: add_federation_records,
    8: add_strict_improvement,
}
