"""Log records for what happens round by round, for programs that read logs.

Every record has the text that `fairfleet watch` prints, and the event's figures as attributes.
Where logs are text, for people, only progress is shown (`log_format.PROGRESS`).
"""

from __future__ import annotations

import logging
from typing import Any

from fairfleet.common.cli.event_text import headline
from fairfleet.common.cli.log_format import EVENTS
from fairfleet.common.wire import evaluation_in
from fairfleet.proto.v1 import operator_pb2 as pb

log = logging.getLogger(EVENTS)

LOGGED_ELSEWHERE = ("client_joined", "client_gone", "federation_finished")


def log_event(event: pb.Event) -> None:
    """Log an event, unless it is routine or another module logs it."""
    kind = event.WhichOneof("kind")
    if not log.isEnabledFor(logging.INFO) or kind is None or kind in LOGGED_ELSEWHERE:
        return
    text = headline(event)
    if text is not None:
        attributes = _figures(kind, getattr(event, kind))
        log.info(text, extra={"event": kind, "round": event.round, **attributes})


def _figures(kind: str, fields: Any) -> dict[str, Any]:
    match kind:
        case "round_started":
            return {"asked": len(fields.clients)}
        case "round_committed":
            return _round_figures(fields.record)
        case "step_tried" | "evaluation_reported":
            return {"client": fields.client}
        case "evaluation_finished":
            return {"reported": fields.reported, "asked": fields.asked, **_score_figures(fields)}
        case "server_evaluated":
            return _server_figures(fields)
    return {}


def _score_figures(evaluation: pb.EvaluationFinished) -> dict[str, Any]:
    if not evaluation.HasField("score"):
        return {}
    score = evaluation.score
    return {
        "measure": score.measure,
        "mean": score.mean,
        "worst_10_percent": score.worst_10_percent,
    }


def _server_figures(evaluated: pb.ServerEvaluated) -> dict[str, Any]:
    if not evaluated.HasField("evaluation"):
        return {"seconds": evaluated.seconds}
    figures = evaluation_in(evaluated.evaluation).figures()
    values = {name: measure.value for name, measure in figures.items()}
    return {"seconds": evaluated.seconds, "measures": values}


def _round_figures(record: pb.RoundRecord) -> dict[str, Any]:
    seconds = record.training_seconds + record.aggregation_seconds + record.commit_seconds
    seconds += record.verification.seconds  # 0 unless the clients tried the step
    return {
        "seconds": seconds,
        "updates": len(record.contributions),
        "dropped": len(record.dropped),
    }
