"""The tables of the audit and of the settings: what operators did, and what the settings were.

Both only grow. Rows are numbered from 1 in their order of time; only one thread writes.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from fairfleet.common.errors import short
from fairfleet.server.storage.queries import ReadableStore, Write
from fairfleet.server.storage.schema import audit, settings_history

MAX_TEXT_CHARS = 300  # of one text among the arguments, and of a result
MAX_SEQUENCE = 2**63 - 1  # of a row: the databases have no larger integers
MAX_ARGUMENTS_CHARS = 8000  # of all arguments as JSON
MORE = "…"  # key of the arguments: how many of them were left out


@dataclass(frozen=True)
class OperatorAction:
    """What somebody did, or asked for."""

    operator: str  # the name in the certificate; empty: the server, or a caller without one
    action: str
    arguments: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class AuditEntry:
    """A row of the audit."""

    sequence: int
    unix_seconds: float
    operator: str
    action: str
    arguments_json: str
    result: str  # empty: done; otherwise why it was refused


def audit_write(action: OperatorAction, refusal: str = "") -> Write:
    """Record an action, or why it was refused."""

    def write(connection: Connection) -> None:
        row = {
            "sequence": _next_number(connection, audit),
            "unix_seconds": time.time(),
            "operator": short(action.operator),
            "action": action.action,
            "arguments": arguments_json(action.arguments),
            "result": short(refusal, MAX_TEXT_CHARS),
        }
        connection.execute(audit.insert(), row)

    return write


def arguments_json(arguments: Mapping[str, Any]) -> str:
    """Return arguments as a JSON object of limited size; long texts and long lists are cut."""
    bounded, size = dict[str, Any](), 0
    for name, value in arguments.items():
        size += len(json.dumps([short(name), _bounded(value)]))
        if size > MAX_ARGUMENTS_CHARS:
            bounded[MORE] = len(arguments) - len(bounded)
            break
        bounded[short(name)] = _bounded(value)
    return json.dumps(bounded)


def _bounded(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)  # JSON has no such number
    if isinstance(value, str):
        return short(value, MAX_TEXT_CHARS)
    if isinstance(value, list | tuple | dict):
        text = json.dumps(value)
        if len(text) > 2 * MAX_TEXT_CHARS:
            return short(text, 2 * MAX_TEXT_CHARS)
    return value


def audit_entries(store: ReadableStore, first: int, count: int) -> list[AuditEntry]:
    """Return up to `count` rows from a sequence number on, the oldest first."""
    if first > MAX_SEQUENCE:
        return []
    query = sa.select(audit).where(audit.c.sequence >= first).order_by(audit.c.sequence)
    return [
        AuditEntry(
            row.sequence, row.unix_seconds, row.operator, row.action, row.arguments, row.result
        )
        for row in store.rows(query.limit(count))
    ]


def newest_settings(store: ReadableStore) -> str | None:
    """Return the settings that were recorded last, as JSON; None if there are none."""
    query = sa.select(settings_history.c.settings).order_by(settings_history.c.sequence.desc())
    rows = store.rows(query.limit(1))
    return str(rows[0].settings) if rows else None


def settings_write(settings_json: str, digest: bytes) -> Write:
    """Record the settings that are in force from now on."""

    def write(connection: Connection) -> None:
        row = {
            "sequence": _next_number(connection, settings_history),
            "digest": digest.hex(),
            "settings": settings_json,
            "unix_seconds": time.time(),
        }
        connection.execute(settings_history.insert(), row)

    return write


def _next_number(connection: Connection, table: sa.Table) -> int:
    return int(connection.scalar(sa.select(sa.func.max(table.c.sequence))) or 0) + 1
