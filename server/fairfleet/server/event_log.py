"""What happens round by round, as log records for programs. Off where logs are for people: see `fairfleet watch`."""

from __future__ import annotations

import logging
from typing import Any

from fairfleet.common.logs import EVENTS
from fairfleet.proto.v1 import operator_pb2 as pb
from fairfleet.server.news import headline

log = logging.getLogger(EVENTS)

LOGGED_ELSEWHERE = ("client_joined", "client_gone", "federation_finished")


def write_down(event: pb.Event) -> None:
    kind = event.WhichOneof("kind")
    if not log.isEnabledFor(logging.INFO) or kind is None or kind in LOGGED_ELSEWHERE:
        return
    line = headline(event)
    if line is not None:
        log.info(line, extra={"event": kind, "round": event.round, **_figures(kind, getattr(event, kind))})


def _figures(kind: str, news: Any) -> dict[str, Any]:
    match kind:
        case "round_started":
            return {"asked": len(news.clients)}
        case "round_committed":
            record = news.record
            seconds = record.training_seconds + record.aggregation_seconds + record.commit_seconds
            seconds += record.verification.seconds  # 0 where the step was not tried
            return {"seconds": seconds, "updates": len(record.contributions), "dropped": len(record.dropped)}
        case "evaluation_reported":
            return {"client": news.client}
        case "evaluation_finished":
            return {"reported": news.reported, "asked": news.asked}
    return {}
