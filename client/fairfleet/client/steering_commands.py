"""`fairfleet pause | resume | stop | revoke | rounds | clients`: what operators tell a server, and look up there."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message
from rich import box
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table

from fairfleet.client.operator_commands import Credentials, Insecure, Json, Server, linked
from fairfleet.proto.v1 import operator_pb2 as pb

Reason = Annotated[str, typer.Option(help="For the records, and for those who ask why.")]
STATES = {number: name.removeprefix("CLIENT_STATE_").lower() for name, number in pb.ClientState.items()}
NOTHING = "-"  # a column with nothing else is left out: there are many, and screens are narrow
OF_A_STEP = ("conflicts", "promised", "improved", "step", "admission", "fallback")
OF_A_ROUND = ("clients", "dropped", "less", "tries", "train s", "step s", "received", *OF_A_STEP)
OF_A_CLIENT = ("state", "device", "samples", "updates", "last", "accuracy", "loss", "version")


def pause(server: Server = None, credentials: Credentials = None, insecure: Insecure = False) -> None:
    """Begin no new round. The one under way is finished; clients stay connected.

    Example:

      fairfleet pause && sleep 600 && fairfleet resume
    """
    with linked(server, credentials, insecure) as link:
        link.pause()
        print(f"paused at version {link.status().version}; `fairfleet resume` goes on")


def resume(server: Server = None, credentials: Credentials = None, insecure: Insecure = False) -> None:
    """Go on after a pause.

    Example:

      fairfleet resume --server fleet.example:8440
    """
    with linked(server, credentials, insecure) as link:
        link.resume()
        print("going on")


def stop(
    server: Server = None,
    credentials: Credentials = None,
    insecure: Insecure = False,
    reason: Reason = "stopped by an operator",
) -> None:
    """End the federation after the round under way. Clients are told and go; the model stays on the server.

    Example:

      fairfleet stop --reason 'good enough'
    """
    with linked(server, credentials, insecure) as link:
        link.stop(reason)
        print(f"ending after the round under way: {reason}")


def revoke(
    client: Annotated[str, typer.Argument(help="Its name.")],
    operator: Annotated[bool, typer.Option("--operator", help="It is an operator's credential, not a client.")] = False,
    server: Server = None,
    credentials: Credentials = None,
    insecure: Insecure = False,
    reason: Reason = "",
) -> None:
    """Shut a client out, at once and for good, whatever certificates it has. What it contributed stays in the model.

    Examples:

      fairfleet revoke kitchen-camera --reason stolen

      fairfleet revoke --operator night-shift --reason 'left the company'
    """
    with linked(server, credentials, insecure) as link:
        link.revoke(client, reason, operator)
        print(f"{client} is out")


def rounds(
    server: Server = None,
    credentials: Credentials = None,
    insecure: Insecure = False,
    last: Annotated[int, typer.Option(min=1, help="How many, the newest.")] = 20,
    as_json: Json = False,
) -> None:
    """The newest rounds: who took part, what it cost, whom the step would harm, and what it did.

    promised: share of the clients whose loss falls to first order; improved: share whose loss fell, and of how many, by
    the reports of the next round; step: which part of it was taken, where clients tried it; admission: updates out of
    the ordinary, and what was done about them.

    Examples:

      fairfleet rounds --last 5

      fairfleet rounds --json | jq .conflicts

      fairfleet rounds --json | jq '.cut_off[] | select(.loss_after > .loss_before)'
    """
    with linked(server, credentials, insecure) as link:
        found = link.rounds(last)
    if as_json:
        for record in found:
            print(json.dumps(_round_json(record)))
        return
    rows = [(str(record.round), *_round_cells(record)) for record in found]
    told = [(name, cells) for name, *cells in zip(("round", *OF_A_ROUND), *rows, strict=True) if {*cells} != {NOTHING}]
    table = Table(*(name for name, _ in told), box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for row in zip(*(cells for _, cells in told), strict=True):
        table.add_row(*row)
    Console(highlight=False).print(table)


def clients(
    server: Server = None, credentials: Credentials = None, insecure: Insecure = False, as_json: Json = False
) -> None:
    """Every client that the server has met: its state, its part in the model, and how it is served. Worst first.

    Examples:

      fairfleet clients

      fairfleet clients --json | jq 'select(.state == "gone") | .client'
    """
    with linked(server, credentials, insecure) as link:
        found = sorted(link.clients(), key=_served)
    if as_json:
        for record in found:
            fields = MessageToDict(record, preserving_proto_field_name=True)
            print(json.dumps({**fields, "state": STATES[record.state]}))
        return
    table = Table("client", *OF_A_CLIENT, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for record in found:
        table.add_row(record.client, *_client_cells(record))
    Console(highlight=False).print(table)


def _round_cells(record: pb.RoundRecord) -> list[str]:
    told = json.loads(record.diagnostics_json)
    return [
        str(len(record.contributions)),
        ", ".join(record.dropped) or NOTHING,
        ", ".join(part.client for part in record.contributions if part.report.cut_by) or NOTHING,
        str(record.attempts) if record.attempts > 1 else NOTHING,
        f"{record.training_seconds:.2f}",
        f"{record.aggregation_seconds:.3f}",
        decimal(record.bytes_received),
        ", ".join(told["conflicts"]) or NOTHING,
        f"{record.promised:.0%}" if record.HasField("promised") else NOTHING,
        f"{record.measured.improved:.0%} of {record.measured.clients}" if record.HasField("measured") else NOTHING,
        f"{record.verification.factor:g}" if record.HasField("verification") else NOTHING,
        _findings(record) or NOTHING,
        NOTHING if told["status"] == "ok" else told["status"],
    ]


def _round_json(record: pb.RoundRecord) -> dict[str, object]:
    told = json.loads(record.diagnostics_json)
    return {
        "round": record.round,
        "clients": [part.client for part in record.contributions],
        "dropped": list(record.dropped),
        "did_less": {
            part.client: {
                "steps": part.report.steps,
                "planned_steps": part.report.planned_steps,
                "batch_size": part.report.batch_size,
                "cut_by": list(part.report.cut_by),
            }
            for part in record.contributions
            if part.report.cut_by
        },
        "attempts": record.attempts,
        "training_seconds": record.training_seconds,
        "aggregation_seconds": record.aggregation_seconds,
        "commit_seconds": record.commit_seconds,
        "bytes_received": record.bytes_received,
        "unix_seconds": record.unix_seconds,
        "promised": record.promised if record.HasField("promised") else None,
        "measured": _plainly(record.measured) if record.HasField("measured") else None,
        "verification": _plainly(record.verification) if record.HasField("verification") else None,
        "cut_off": [_plainly(one) for one in record.cut_off],
        "admission": [_plainly(one) for one in record.admission],
        **{key: told[key] for key in ("rule", "status", "conflicts", "direction_norm", "cosines", "coefficients")},
    }


def _findings(record: pb.RoundRecord) -> str:
    """Who did not count as it came, and why; for those who were only observed, how many."""
    done = [f"{one.client} {one.decision} ({one.check})" for one in record.admission if one.decision != "observed"]
    observed = len(record.admission) - len(done)
    return ", ".join([*done, f"{observed} observed"] if observed else done)


def _plainly(message: Message) -> dict[str, Any]:
    """Also the zeros; but MessageToDict makes 64-bit numbers text."""
    found = MessageToDict(message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
    return {key: int(value) if key.startswith("round_") else value for key, value in found.items()}


def _served(record: pb.ClientRecord) -> tuple[bool, float, str]:
    known = record.HasField("evaluation") and record.evaluation.HasField("accuracy")
    return (not known, record.evaluation.accuracy, record.client)


def _client_cells(record: pb.ClientRecord) -> list[str]:
    evaluation = record.evaluation if record.HasField("evaluation") else None
    return [
        STATES[record.state],
        record.device or "-",
        str(record.train_samples or "-"),
        str(record.updates_counted),
        str(record.last_counted_round) if record.HasField("last_counted_round") else "-",
        f"{100 * evaluation.accuracy:.1f} %" if evaluation and evaluation.HasField("accuracy") else "-",
        f"{evaluation.loss:.4f}" if evaluation else "-",
        str(record.evaluated_version) if record.HasField("evaluated_version") else "-",
    ]
