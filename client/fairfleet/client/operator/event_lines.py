"""A federation as plain lines, for logs and pipes: one line per notable event, none for routine.

Most lines are the shared text of the event. Where a view of the federation has more to say (the
number of planned rounds, the fleet's accuracy), the line comes from here.
"""

from __future__ import annotations

from rich.filesize import decimal

from fairfleet.client.operator import formatting
from fairfleet.client.operator.fleet_view import Disconnected, FleetView, Observation, Snapshot
from fairfleet.common.cli.durations import format_duration
from fairfleet.common.cli.event_text import count, figure, headline
from fairfleet.common.errors import short
from fairfleet.common.fairness import mean
from fairfleet.common.wire import measured_as
from fairfleet.proto.v1 import operator_pb2 as pb

# What the mean of a round's losses is called, by how they were measured.
LOSS_WORDS = {"batches": "batch loss", "sampled": "sampled loss", "mixed": "loss (mixed)"}


def lines(before: FleetView, observation: Observation, after: FleetView) -> list[str]:
    """Return the lines for an observation that led from one view to the next; often none."""
    match observation:
        case Snapshot():
            return [] if before.finished else [_greeting(after)]
        case Disconnected(why) if not before.trouble:
            return [f"{why} Trying again." if why.endswith(".") else f"{why}; trying again"]
        case pb.Event():
            line = _event_line(observation, after)
            return [line] if line else []
    return []


def _greeting(view: FleetView) -> str:
    status = view.status
    about = f"{status.federation}: {status.rule}, {count(status.parameters, 'parameter')}"
    return f"{about}, {formatting.round_of(view)}; {formatting.phase(view)}"


def _event_line(event: pb.Event, view: FleetView) -> str | None:
    match event.WhichOneof("kind"):
        case "round_started":
            return _retried(event.round_started, view) if event.round_started.attempt else None
        case "round_committed":
            return _committed(event.round_committed.record, view)
        case "evaluation_finished":
            return _evaluated(view)
        case "federation_finished":
            rounds = count(view.status.version, "round")
            return f"finished after {rounds}: {short(event.federation_finished.reason)}"
    return headline(event)


def _retried(started: pb.RoundStarted, view: FleetView) -> str:
    clients = count(len(started.clients), "more client")
    return (
        f"{formatting.round_of(view)}: attempt {started.attempt + 1} selects {clients}, "
        f"keeps {count(started.received, 'update')}"
    )


def _evaluated(view: FleetView) -> str | None:
    if not view.evaluations:
        return None
    newest = view.evaluations[-1]
    return (
        f"evaluation after round {newest.version}: "
        f"mean {newest.measure} {figure(newest.measure, newest.mean)}, "
        f"worst {newest.worst_client} {figure(newest.measure, newest.worst)}"
    )


def _committed(record: pb.RoundRecord, view: FleetView) -> str:
    parts = [count(len(record.contributions), "update")]
    if record.contributions:
        reports = [contribution.report for contribution in record.contributions]
        kind = LOSS_WORDS.get(measured_as(reports), "loss")
        parts.append(f"mean {kind} {mean([report.loss_before for report in reports]):.3f}")
    if record.HasField("verification"):
        parts.append(f"step {record.verification.factor:g} ({record.verification.outcome})")
    parts.append(f"training {format_duration(record.training_seconds)}")
    parts.append(f"aggregation {format_duration(record.aggregation_seconds)}")
    if record.HasField("verification"):
        parts.append(f"verification {format_duration(record.verification.seconds)}")
    parts.append(f"commit {format_duration(record.commit_seconds)}")
    parts.append(f"{decimal(record.bytes_received)} received")
    lost = f"; without {short(', '.join(record.dropped), 60)}" if record.dropped else ""
    return f"round {record.round + 1} of {view.status.rounds_planned}: {', '.join(parts)}{lost}"
