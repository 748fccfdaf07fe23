"""The table of the server's own evaluations: what its test data say about a version."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from fairfleet.common.reports import Evaluation
from fairfleet.server.storage.queries import ReadableStore, Write
from fairfleet.server.storage.schema import server_evaluations as table


@dataclass(frozen=True)
class ServerEvaluation:
    """What the server's own test data say about a version, or why they say nothing."""

    version: int
    evaluation: Evaluation | None
    failure: str
    seconds: float
    unix_seconds: float = 0.0


def server_evaluation_write(result: ServerEvaluation) -> Write:
    """Record an evaluation; it replaces an earlier one of the same version."""
    row = {
        "version": result.version,
        "evaluation": result.evaluation.model_dump_json() if result.evaluation else None,
        "failure": result.failure,
        "seconds": result.seconds,
        "unix_seconds": result.unix_seconds or time.time(),
    }

    def write(connection: Connection) -> None:
        connection.execute(table.delete().where(table.c.version == result.version))
        connection.execute(table.insert(), row)

    return write


def recorded_server_evaluations(store: ReadableStore) -> Sequence[ServerEvaluation]:
    """Return all recorded evaluations, in order of version."""
    rows = store.rows(sa.select(table).order_by(table.c.version))
    return [
        ServerEvaluation(
            row.version,
            Evaluation.model_validate_json(row.evaluation) if row.evaluation else None,
            row.failure,
            row.seconds,
            row.unix_seconds,
        )
        for row in rows
    ]
