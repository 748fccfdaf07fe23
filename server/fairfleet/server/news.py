"""What happened, in one line for people; what comes by the thousand has none."""

from __future__ import annotations

from typing import Any

from fairfleet.common.errors import short
from fairfleet.proto.v1 import operator_pb2 as pb


def headline(event: pb.Event) -> str | None:
    kind = event.WhichOneof("kind")
    news: Any = getattr(event, kind) if kind else None
    match kind:
        case "client_joined":
            return f"{news.client} joined"
        case "client_gone":
            return f"{news.client} is gone: {short(news.reason)}"
        case "round_started" if news.attempt:
            return f"round {event.round}, attempt {news.attempt + 1}: {_clients(len(news.clients))} more asked"
        case "round_started":
            return f"round {event.round}: {_clients(len(news.clients))} asked"
        case "round_committed":
            return _committed(news.record)
        case "evaluation_reported" if news.failure:
            return f"{news.client} cannot evaluate: {short(news.failure)}"
        case "evaluation_finished" if not news.asked:
            return f"version {event.round} was evaluated by nobody: no client that is connected has test data"
        case "evaluation_finished":
            return f"version {event.round} evaluated by {news.reported:,} of {_clients(news.asked)}"
        case "federation_paused":
            return "paused"
        case "federation_resumed":
            return "resumed"
        case "federation_finished":
            return f"finished: {short(news.reason)}"
    return None


def _committed(record: pb.RoundRecord) -> str:
    line = f"round {record.round} committed, {len(record.contributions)} updates"
    if record.dropped:
        line += f", without {short(', '.join(record.dropped))}"
    rejected = sorted({one.client for one in record.admission if one.decision == "rejected" and not one.stood_in})
    return f"{line}; rejected: {short(', '.join(rejected))}" if rejected else line


def _clients(count: int) -> str:
    return "1 client" if count == 1 else f"{count:,} clients"
