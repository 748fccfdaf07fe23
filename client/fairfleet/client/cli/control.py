"""`fairfleet pause`, `resume`, `stop`, `continue`, `revoke`, `rounds` and `clients`.

Operators control a federation with the first five and look up its records with the others.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message
from rich import box
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table

from fairfleet.client.cli.observe import connect
from fairfleet.client.cli.options import CredentialsFile, Insecure, Json, Server
from fairfleet.client.operator import client_table
from fairfleet.client.operator.fleet_view import FleetView, fold
from fairfleet.client.operator.full_tables import print_in_full
from fairfleet.common.errors import UsageError, short
from fairfleet.common.fairness import mean
from fairfleet.common.wire import measured_as
from fairfleet.proto.v1 import operator_pb2 as pb

REASON_HELP = "Reason, for the records."
Yes = Annotated[
    bool, typer.Option("--yes", "-y", help="Do not ask whether to stop.", show_default="off")
]
NOTHING = "-"  # A column with nothing else is left out: there are many, and screens are narrow.
STEP_COLUMNS = ("conflicts", "promised", "improved", "step", "admission", "fallback")
ROUND_COLUMNS = (
    "clients",
    "dropped",
    "less",
    "tries",
    "train s",
    "step s",
    "received",
    *STEP_COLUMNS,
)


def pause(
    server: Server = None, credentials: CredentialsFile = None, insecure: Insecure = False
) -> None:
    """Start no new round until `fairfleet resume`.

    The current round is finished, and clients stay connected.

    Example:

      fairfleet pause && sleep 600 && fairfleet resume
    """
    with connect(server, credentials, insecure) as connection:
        connection.pause()
        print(f"paused at version {connection.status().version}; `fairfleet resume` continues")


def resume(
    server: Server = None, credentials: CredentialsFile = None, insecure: Insecure = False
) -> None:
    """Continue a paused federation.

    Example:

      fairfleet resume --server fleet.example:8440
    """
    with connect(server, credentials, insecure) as connection:
        connection.resume()
        print("resumed")


def stop(
    server: Server = None,
    credentials: CredentialsFile = None,
    insecure: Insecure = False,
    reason: Annotated[str, typer.Option(help=REASON_HELP)] = "stopped by an operator",
    yes: Yes = False,
) -> None:
    """End the federation after the current round.

    Clients are informed and exit. The model stays on the server. `fairfleet continue` lets the
    federation go on.

    Examples:

      fairfleet stop --reason 'good enough'

      fairfleet stop --yes --reason 'maintenance'
    """
    with connect(server, credentials, insecure) as connection:
        if not yes:
            _confirm_stop(connection.status())
        connection.stop(reason)
        print(f"the federation ends after the current round: {reason}")


def _confirm_stop(status: pb.StatusResponse) -> None:
    """Ask on a terminal whether to stop; raise UsageError without one."""
    progress = f"version {status.version} of {status.rounds_planned} planned rounds"
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise UsageError(
            f"stop would end federation {status.federation} at {progress}, and there is no "
            "terminal to ask on; give --yes to stop without a question"
        )
    question = f"End federation {short(status.federation)} at {progress}?"
    if not _is_confirmed(question):
        raise UsageError("nothing was stopped")


def _is_confirmed(question: str) -> bool:
    """Ask a question on the terminal; the end of the input means no."""
    try:
        return typer.confirm(question, err=True)
    except typer.Abort as abort:  # by Ctrl-C or Ctrl-D
        if isinstance(abort.__context__, KeyboardInterrupt):
            raise KeyboardInterrupt from None
        return False


def continue_(
    from_version: Annotated[
        int | None,
        typer.Option(
            "--from",
            min=0,
            metavar="VERSION",
            help="Go back to this version; the rounds after it are undone.",
            show_default="the newest",
        ),
    ] = None,
    rounds: Annotated[
        int | None,
        typer.Option(
            min=1, help="New total of rounds, undone ones included.", show_default="as planned"
        ),
    ] = None,
    seconds: Annotated[
        float | None,
        typer.Option(min=0, help="End after so many more seconds.", show_default="as planned"),
    ] = None,
    server: Server = None,
    credentials: CredentialsFile = None,
    insecure: Insecure = False,
) -> None:
    """Let a finished federation go on, also from an earlier version.

    Also withdraws a stop before the current round is over. Clients that have left must be started
    again. The new limits hold until the server's own settings of them change.

    Examples:

      fairfleet continue --rounds 150

      fairfleet continue --from 40 --rounds 150

      fairfleet continue --seconds 3600
    """
    with connect(server, credentials, insecure) as connection:
        answer = connection.continue_training(from_version, rounds, seconds)
    back = "" if from_version is None else f", which has the model of version {from_version}"
    print(f"continues at version {answer.version} of {answer.rounds_planned}{back}")


def revoke(
    client: Annotated[str, typer.Argument(help="Name of the client, or of the operator.")],
    operator: Annotated[
        bool,
        typer.Option(
            "--operator", help="Revoke an operator's credentials, not a client.", show_default="off"
        ),
    ] = False,
    server: Server = None,
    credentials: CredentialsFile = None,
    insecure: Insecure = False,
    reason: Annotated[str, typer.Option(help=REASON_HELP, show_default="none")] = "",
) -> None:
    """Exclude a client or an operator permanently.

    It takes effect immediately, whatever certificates the client has. What the client contributed
    stays in the model.

    Examples:

      fairfleet revoke kitchen-camera --reason stolen

      fairfleet revoke --operator night-shift --reason 'left the company'
    """
    with connect(server, credentials, insecure) as connection:
        connection.revoke(client, reason, operator)
        print(f"Revoked {'operator' if operator else 'client'} {client}.")


def rounds(
    server: Server = None,
    credentials: CredentialsFile = None,
    insecure: Insecure = False,
    last: Annotated[int, typer.Option(min=1, help="Number of rounds to list.")] = 20,
    as_json: Json = False,
) -> None:
    """List the newest rounds and what each step did.

    promised: share of the clients whose loss falls to first order. improved: share whose loss did
    not rise, by the reports of the next round, and of how many clients. step: which part of the
    step was taken, if clients tried it. admission: unusual updates and what was done about them.

    Rounds are counted from 1 in the table, as everywhere in texts; in JSON, from 0.

    Examples:

      fairfleet rounds --last 5

      fairfleet rounds --json | jq .conflicts

      fairfleet rounds --json | jq '.cut_off[].loss_after'
    """
    with connect(server, credentials, insecure) as connection:
        records = connection.rounds(last)
    if as_json:
        for record in records:
            print(json.dumps(_round_json(record)))
    else:
        Console(highlight=False).print(_rounds_table(records))


def clients(
    server: Server = None,
    credentials: CredentialsFile = None,
    insecure: Insecure = False,
    as_json: Json = False,
) -> None:
    """List all clients of the federation, worst served first.

    Each client has its state, its software, its contribution to the model, and its measures. The
    server's setting `measure` says by which clients are compared. Below are the versions of the
    software in use, and the clients that cannot be selected.

    Examples:

      fairfleet clients

      fairfleet clients --json | jq 'select(.state == "gone") | .client'
    """
    with connect(server, credentials, insecure) as connection:
        snapshot = connection.snapshot()
    view = fold(FleetView(), snapshot)
    by_name = {record.client: record for record in snapshot.clients}
    records = [by_name[client.name] for client in view.by_need()]
    if as_json:
        for record in records:
            fields = MessageToDict(record, preserving_proto_field_name=True)
            print(json.dumps({**fields, "state": client_table.STATES[record.state]}))
        return
    columns = client_table.columns(records, view.measure)
    table = _table("client", *columns)
    for record in records:
        table.add_row(record.client, *client_table.cells(record, columns))
    console = Console(highlight=False, markup=False, emoji=False)  # a device may be called [/x]
    print_in_full(table, console)
    for remark in client_table.remarks(records, snapshot.status.software):
        console.print(remark, soft_wrap=True)


def _table(*headings: str) -> Table:
    return Table(*headings, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)


def _rounds_table(records: Sequence[pb.RoundRecord]) -> Table:
    rows = [
        (f"{record.round + 1}{' (undone)' if record.undone else ''}", *_round_cells(record))
        for record in records
    ]
    columns = [
        (heading, cells)
        for heading, *cells in zip(("round", *ROUND_COLUMNS), *rows, strict=True)
        if {*cells} != {NOTHING}
    ]
    table = _table(*(heading for heading, _ in columns))
    for row in zip(*(cells for _, cells in columns), strict=True):
        table.add_row(*row)
    return table


def _round_cells(record: pb.RoundRecord) -> list[str]:
    diagnostics = json.loads(record.diagnostics_json)
    measured = f"{record.measured.improved:.0%} of {record.measured.clients}"
    status = diagnostics["status"]
    return [
        str(len(record.contributions)),
        ", ".join(record.dropped) or NOTHING,
        ", ".join(part.client for part in record.contributions if part.report.cut_by) or NOTHING,
        str(record.attempts) if record.attempts > 1 else NOTHING,
        f"{record.training_seconds:.2f}",
        f"{record.aggregation_seconds:.3f}",
        decimal(record.bytes_received),
        _conflicts(diagnostics),
        f"{record.promised:.0%}" if record.HasField("promised") else NOTHING,
        measured if record.HasField("measured") else NOTHING,
        f"{record.verification.factor:g}" if record.HasField("verification") else NOTHING,
        _admission(record) or NOTHING,
        NOTHING if status == "ok" else status,
    ]


def _round_json(record: pb.RoundRecord) -> dict[str, object]:
    diagnostics = json.loads(record.diagnostics_json)
    return {
        "round": record.round,
        "clients": [part.client for part in record.contributions],
        "dropped": list(record.dropped),
        "did_less": {
            part.client: _reduced_work(part.report)
            for part in record.contributions
            if part.report.cut_by
        },
        "training_loss": _training_loss(record),
        "attempts": record.attempts,
        "training_seconds": record.training_seconds,
        "aggregation_seconds": record.aggregation_seconds,
        "commit_seconds": record.commit_seconds,
        "bytes_received": record.bytes_received,
        "unix_seconds": record.unix_seconds,
        "undone": record.undone,
        "settings_digest": record.settings_digest.hex(),
        **_step_json(record),
        # The level at which the figures were computed; null if the server does not report it.
        "diagnostics": diagnostics.get("level"),
        "conflicts": diagnostics.get("conflicts"),  # null if they were not computed
        **{
            key: diagnostics[key]
            for key in ("rule", "status", "direction_norm", "cosines", "coefficients")
        },
    }


def _training_loss(record: pb.RoundRecord) -> dict[str, object] | None:
    """Return the mean of the losses before training, and how they were measured."""
    reports = [part.report for part in record.contributions]
    if not reports:
        return None
    mean_loss = mean([report.loss_before for report in reports])
    return {"mean": mean_loss, "measurement": measured_as(reports)}


def _reduced_work(report: Any) -> dict[str, object]:
    return {
        "steps": report.steps,
        "planned_steps": report.planned_steps,
        "batch_size": report.batch_size,
        "cut_by": list(report.cut_by),
    }


def _step_json(record: pb.RoundRecord) -> dict[str, object]:
    has = record.HasField
    return {
        "promised": record.promised if has("promised") else None,
        "measured": _message_fields(record.measured) if has("measured") else None,
        "verification": _message_fields(record.verification) if has("verification") else None,
        "cut_off": [_message_fields(row) for row in record.cut_off],
        "admission": [_message_fields(row) for row in record.admission],
    }


def _conflicts(diagnostics: dict[str, Any]) -> str:
    """Return the clients that the direction harms, or why they are unknown."""
    if diagnostics.get("conflicts") is None:
        return f"not computed (diagnostics {diagnostics.get('level', 'unknown')})"
    return ", ".join(diagnostics["conflicts"]) or NOTHING


def _admission(record: pb.RoundRecord) -> str:
    """Return whose update was changed or refused, and why; of observed ones only the number."""
    handled = [
        f"{row.client} {row.decision} ({row.check})"
        for row in record.admission
        if row.decision != "observed"
    ]
    observed = len(record.admission) - len(handled)
    return ", ".join([*handled, f"{observed} observed"] if observed else handled)


def _message_fields(message: Message) -> dict[str, Any]:
    """Return all fields, zeros included. MessageToDict makes 64-bit numbers text; undo that."""
    fields = MessageToDict(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    return {key: _field(key, value) for key, value in fields.items()}


def _field(key: str, value: Any) -> Any:
    if key.startswith("measurement_"):
        return value.removeprefix("LOSS_MEASUREMENT_").lower()
    return int(value) if key.startswith("round_") else value
