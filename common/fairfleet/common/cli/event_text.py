"""Events of a federation as one line of text each, from the event alone.

`fairfleet watch`, the server's log and the dashboard use this text. Events that come by the
thousand (an update, a progress report) have no line. Rounds are counted from 1, as in all texts
for people; the protocol, JSON and metrics count them from 0.
"""

from __future__ import annotations

from typing import Any

from fairfleet.common.errors import short
from fairfleet.common.names import round_name
from fairfleet.proto.v1 import operator_pb2 as pb


def headline(event: pb.Event) -> str | None:
    """Return the line of an event, or None for one that is routine or unknown."""
    kind = event.WhichOneof("kind")
    fields: Any = getattr(event, kind) if kind else None
    match kind:
        case "client_joined" | "client_gone":
            return _membership(fields)
        case "round_started":
            return _round_started(event.round, fields)
        case "round_committed":
            return _round_committed(fields.record)
        case "step_tried" if fields.failure:
            return f"{fields.client} could not try the step: {short(fields.failure)}"
        case "evaluation_reported" if fields.failure:
            return f"{fields.client} could not evaluate: {short(fields.failure)}"
        case "evaluation_finished":
            return _evaluation_finished(event.round, fields)
        case "server_evaluated":
            return _server_evaluated(fields)
        case "federation_paused" if fields.reason:
            return f"no round begins: {short(fields.reason, 400)}"
        case "federation_paused":
            return "paused: no new round starts after the current one"
        case "federation_resumed":
            return "resumed"
        case "federation_continued":
            planned = count(fields.rounds_planned, "planned round")
            return f"continues at version {fields.version} of {planned}"
        case "federation_finished":
            return f"finished: {short(fields.reason)}"
    return None


def count(number: int, thing: str) -> str:
    """Return a number of things, with a plural: `1 client`, `2 clients`."""
    return f"{number:,} {thing}" if number == 1 else f"{number:,} {thing}s"


def _membership(change: pb.ClientJoined | pb.ClientGone) -> str:
    if isinstance(change, pb.ClientJoined):
        samples = count(change.train_samples, "sample")
        return f"{change.client} joined with {samples}; {change.connected} connected"
    what = "has retired" if change.retired else "is gone"
    return f"{change.client} {what} ({short(change.reason)}); {change.connected} connected"


def _round_started(number: int, started: pb.RoundStarted) -> str:
    clients = len(started.clients)
    if started.attempt:
        more = count(clients, "more client")
        return f"{round_name(number)}, attempt {started.attempt + 1}: {more} selected"
    return f"{round_name(number)}: {count(clients, 'client')} selected"


def _round_committed(record: pb.RoundRecord) -> str:
    line = f"{round_name(record.round)} committed, {count(len(record.contributions), 'update')}"
    if record.dropped:
        line += f", without {short(', '.join(record.dropped))}"
    for decision in ("rejected", "quarantined"):
        clients = _clients_with(record, decision)
        line += f"; {decision}: {short(', '.join(clients))}" if clients else ""
    return line


def _clients_with(record: pb.RoundRecord, decision: str) -> list[str]:
    """Return the clients whose own update met a decision, without rows of absent clients."""
    rows = (row for row in record.admission if row.decision == decision and not row.stood_in)
    return sorted({row.client for row in rows})


def _evaluation_finished(version: int, evaluation: pb.EvaluationFinished) -> str:
    if not evaluation.asked:
        return f"version {version} was not evaluated: no connected client has test data"
    clients = count(evaluation.asked, "client")
    line = f"version {version} evaluated by {evaluation.reported:,} of {clients}"
    if evaluation.HasField("score"):
        score = evaluation.score
        mean, tenth = (figure(score.measure, v) for v in (score.mean, score.worst_10_percent))
        line += f": {score.measure} {mean} on average, {tenth} for the worst 10 %"
    return line


def _server_evaluated(evaluated: pb.ServerEvaluated) -> str:
    about = f"version {evaluated.version} on the server's own test data"
    if evaluated.failure:
        return f"{about}: failed: {short(evaluated.failure, 300)}"
    message = evaluated.evaluation
    built_in = [
        (name, getattr(message, name)) for name in ("loss", "accuracy") if message.HasField(name)
    ]
    named = [(measure.name, measure.value) for measure in message.measures]
    return f"{about}: " + ", ".join(f"{name} {figure(name, v)}" for name, v in built_in + named)


def figure(measure: str, value: float) -> str:
    """Return a value of a measure as people read it: an accuracy in percent.

    >>> figure("accuracy", 0.5), figure("auc", 0.93)
    ('50.0 %', '0.9300')
    """
    if measure == "accuracy":
        return f"{100 * value:.1f} %"
    return f"{value:.4f}" if 1e-3 <= abs(value) < 1e4 or not value else f"{value:.4g}"
