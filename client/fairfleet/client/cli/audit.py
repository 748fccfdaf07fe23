"""`fairfleet audit`: what operators did to a federation, and changes of its settings."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from fairfleet.client.cli.observe import connect
from fairfleet.client.cli.options import CredentialsFile, Insecure, Json, Server
from fairfleet.common.errors import UsageError, short
from fairfleet.proto.v1 import operator_pb2 as pb

MAX_CELL_CHARS = 300
HEADINGS = ("time", "operator", "action", "arguments", "result")


def audit(
    server: Server = None,
    credentials: CredentialsFile = None,
    insecure: Insecure = False,
    since: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="Only from then on, as 2026-01-31 or 2026-01-31T12:00.",
            show_default="the beginning",
        ),
    ] = None,
    action: Annotated[
        str | None,
        typer.Option(help="Only this action, such as stop or settings.", show_default="all"),
    ] = None,
    as_json: Json = False,
) -> None:
    """List what operators did, and changes of the settings.

    The newest entry is the last. Refused actions are listed too, with the reason. The name is that
    in the operator's certificate; a dash stands for the server itself, or a caller without one.

    Examples:

      fairfleet audit

      fairfleet audit --since 2026-01-31 --action stop

      fairfleet audit --json | jq 'select(.result != "")'
    """
    earliest = _unix_seconds(since) if since else 0.0
    with connect(server, credentials, insecure) as connection:
        records = connection.audit()
    chosen = [
        record
        for record in records
        if record.unix_seconds >= earliest and action in (None, record.action)
    ]
    if as_json:
        for record in chosen:
            print(json.dumps(_as_json(record)))
    else:
        Console(highlight=False).print(_as_table(chosen))


def _unix_seconds(text: str) -> float:
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        raise UsageError(
            f"--since {text!r} is not a time; give one such as 2026-01-31 or 2026-01-31T12:00"
        ) from None


def _as_json(record: pb.AuditRecord) -> dict[str, Any]:
    return {
        "sequence": record.sequence,
        "unix_seconds": record.unix_seconds,
        "operator": record.operator,
        "action": record.action,
        "arguments": json.loads(record.arguments_json),
        "result": record.result,
    }


def _as_table(records: Sequence[pb.AuditRecord]) -> Table:
    table = Table(
        # A name that does not fit goes on in the next line: two may begin alike.
        *(Column(heading, overflow="fold") for heading in HEADINGS),
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
    for record in records:
        time = datetime.fromtimestamp(record.unix_seconds).isoformat(" ", "seconds")
        result = f"refused: {short(record.result, MAX_CELL_CHARS)}" if record.result else "done"
        who = short(record.operator) or "-"
        cells = (time, who, record.action, _arguments(record), result)
        table.add_row(*map(Text, cells))  # brackets in a reason are no markup
    return table


def _arguments(record: pb.AuditRecord) -> str:
    """Return the arguments on one line; those of changed settings as old -> new."""
    arguments = json.loads(record.arguments_json)
    is_change = record.action == "settings"
    parts = [
        f"{name}: {value[0]} -> {value[1]}"
        if is_change and isinstance(value, list)
        else f"{name}={value}"
        for name, value in arguments.items()
    ]
    return short(", ".join(parts), MAX_CELL_CHARS) or "-"
