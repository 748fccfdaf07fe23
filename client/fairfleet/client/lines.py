"""A federation in plain lines, for logs and pipes: one per thing that matters, none for what is routine."""

from __future__ import annotations

from rich.filesize import decimal

from fairfleet.client import words
from fairfleet.client.fleet_view import Disconnected, Observation, Snapshot, View
from fairfleet.common.errors import short
from fairfleet.common.fairness import mean
from fairfleet.proto.v1 import operator_pb2 as pb


def lines(before: View, seen: Observation, after: View) -> list[str]:
    """What to say of an observation that led from one view to the next; often nothing."""
    match seen:
        case Snapshot():
            return [] if before.finished else [_greeting(after)]
        case Disconnected(why) if not before.trouble:
            return [f"{why} Trying again." if why.endswith(".") else f"{why}; trying again"]
        case pb.Event():
            kind = seen.WhichOneof("kind")
            return _told(getattr(seen, kind), after) if kind else []
    return []


def _greeting(view: View) -> str:
    status = view.status
    about = f"{status.federation}: {status.rule}, {words.count(status.parameters, 'parameter')}"
    return f"{about}, {words.round_of(view)}; {words.phase(view)}"


def _told(news: object, view: View) -> list[str]:
    match news:
        case pb.ClientJoined():
            samples = words.count(news.train_samples, "sample")
            return [f"{news.client} joined with {samples}; {news.connected} connected"]
        case pb.ClientGone():
            return [f"{news.client} is gone ({short(news.reason)}); {news.connected} connected"]
        case pb.RoundStarted() if news.attempt:
            asked = words.count(len(news.clients), "more client")
            return [
                f"{words.round_of(view)}: attempt {news.attempt + 1} asks {asked}, {news.received} updates are kept"
            ]
        case pb.RoundCommitted():
            return [_committed(news.record, view)]
        case pb.StepTried() if news.failure:
            return [f"{news.client} could not try the step: {short(news.failure)}"]
        case pb.EvaluationReported() if news.failure:
            return [f"{news.client} could not evaluate: {short(news.failure)}"]
        case pb.EvaluationFinished() if view.evaluations:
            served = view.evaluations[-1]
            worst = f"worst {served.worst_client} {words.percent(served.worst)}"
            return [f"evaluation after round {served.version}: mean accuracy {words.percent(served.mean)}, {worst}"]
        case pb.FederationPaused():
            return ["paused: the round under way is finished, and no new one begins"]
        case pb.FederationResumed():
            return ["resumed"]
        case pb.FederationFinished():
            return [f"finished after {words.count(view.status.version, 'round')}: {short(news.reason)}"]
    return []


def _committed(record: pb.RoundRecord, view: View) -> str:
    parts = [words.count(len(record.contributions), "update")]
    if record.contributions:
        parts.append(f"mean loss {mean([c.report.loss_before for c in record.contributions]):.3f}")
    if record.HasField("verification"):
        parts.append(f"step {record.verification.factor:g} ({record.verification.outcome})")
    parts.append(f"training {words.duration(record.training_seconds)}")
    parts.append(f"aggregation {words.duration(record.aggregation_seconds)}")
    if record.HasField("verification"):
        parts.append(f"verification {words.duration(record.verification.seconds)}")
    parts.append(f"commit {words.duration(record.commit_seconds)}")
    parts.append(f"{decimal(record.bytes_received)} received")
    lost = f"; without {short(', '.join(record.dropped), 60)}" if record.dropped else ""
    return f"round {record.round + 1} of {view.status.rounds_planned}: {', '.join(parts)}{lost}"
