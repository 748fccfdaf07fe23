"""State directories of older versions, made into today's, step by step. Each step is one transaction.

A step says in plain SQL what it does: the tables as they are defined today would not fit yesterday's.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from urllib.parse import unquote

import sqlalchemy as sa
from sqlalchemy.engine import Connection

Migration = Callable[[Connection, Path], None]


def name_history_rows(connection: Connection, folder: Path) -> None:
    """1 -> 2: the database names the history's rows; until now whatever lay in the folder counted."""
    connection.execute(
        sa.text(
            "CREATE TABLE IF NOT EXISTS history (client TEXT NOT NULL PRIMARY KEY, round INTEGER NOT NULL, "
            "digest TEXT NOT NULL, loss FLOAT NOT NULL, samples FLOAT NOT NULL)"
        )
    )
    newest: dict[str, int] = {}
    for file in (folder / "history").glob("*@*.npy"):
        name, _, number_text = file.stem.rpartition("@")
        newest[unquote(name)] = max(newest.get(unquote(name), -1), int(number_text))
    for client, number in newest.items():
        found = connection.execute(
            sa.text("SELECT digest, report FROM updates WHERE client = :client AND round = :round"),
            {"client": client, "round": number},
        ).one_or_none()
        if found is not None:  # else a row of a round that was not committed
            report = json.loads(found.report)
            connection.execute(
                sa.text("INSERT INTO history VALUES (:client, :round, :digest, :loss, :samples)"),
                {
                    "client": client,
                    "round": number,
                    "digest": found.digest,
                    "loss": report["loss_before"],
                    "samples": report["samples"],
                },
            )


def measure_steps(connection: Connection, folder: Path) -> None:
    """2 -> 3: answers of clients that tried a step, what steps did to losses, and whom deadlines cut off."""
    for table in (
        "trials (round INTEGER NOT NULL, client TEXT NOT NULL, step TEXT NOT NULL, losses TEXT, "
        "failure TEXT NOT NULL, unix_seconds FLOAT NOT NULL, PRIMARY KEY (round, client, step))",
        "measures (round INTEGER NOT NULL PRIMARY KEY, improved FLOAT NOT NULL, clients INTEGER NOT NULL)",
        "cut_off (round INTEGER NOT NULL, client TEXT NOT NULL, loss_before FLOAT, round_before INTEGER, "
        "loss_after FLOAT, round_after INTEGER, PRIMARY KEY (round, client))",
    ):
        connection.execute(sa.text(f"CREATE TABLE IF NOT EXISTS {table}"))


def find_cut_off_by_client(connection: Connection, folder: Path) -> None:
    """3 -> 4: whoever comes back is found among all who were ever cut off without looking at each."""
    connection.execute(sa.text("CREATE INDEX IF NOT EXISTS cut_off_by_client ON cut_off (client, loss_after)"))


def keep_tokens(connection: Connection, folder: Path) -> None:
    """4 -> 5: tokens of devices that enrol with a key of their own, and operators that were revoked."""
    for table in (
        "revoked_operators (name TEXT NOT NULL PRIMARY KEY, reason TEXT)",
        "tokens (client TEXT NOT NULL PRIMARY KEY, digest TEXT NOT NULL, expires_unix FLOAT NOT NULL, "
        "certificate_seconds FLOAT NOT NULL, used_by TEXT)",
    ):
        connection.execute(sa.text(f"CREATE TABLE IF NOT EXISTS {table}"))


def name_bases(connection: Connection, folder: Path) -> None:
    """5 -> 6: updates that are told by an earlier one say by which."""
    if "base" not in {column["name"] for column in sa.inspect(connection).get_columns("updates")}:
        connection.execute(sa.text("ALTER TABLE updates ADD COLUMN base TEXT"))


# From each version to the next.
MIGRATIONS: dict[int, Migration] = {
    1: name_history_rows,
    2: measure_steps,
    3: find_cut_off_by_client,
    4: keep_tokens,
    5: name_bases,
}
