"""Numbers and states in words, the same wherever people read them."""

from __future__ import annotations

from fairfleet.client.fleet_view import View
from fairfleet.common.errors import short
from fairfleet.proto.v1 import operator_pb2 as pb


def duration(seconds: float) -> str:
    if seconds < 0.0995:
        return f"{1000 * seconds:.2g} ms"
    if seconds < 59.95:
        return f"{seconds:.2f} s" if seconds < 9.995 else f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s"


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def count(number: int, thing: str) -> str:
    return f"{number:,} {thing}" if number == 1 else f"{number:,} {thing}s"


def round_of(view: View) -> str:
    """People count from one: version 3 of 100 means that the fourth round is under way."""
    status = view.status
    if view.finished:
        return f"{count(status.version, 'round')} of {status.rounds_planned:,} done"
    return f"round {min(status.version + 1, status.rounds_planned):,} of {status.rounds_planned:,}"


def phase(view: View) -> str:
    status = view.status
    if view.trouble:
        return "the server does not answer; trying again"
    match status.phase:
        case pb.PHASE_WAITING if status.paused:
            return "paused; `Resume` lets the next round begin"
        case pb.PHASE_WAITING if status.missing:
            return f"waiting for {count(status.missing, 'more client')}"
        case pb.PHASE_WAITING:
            return "about to begin"
        case pb.PHASE_TRAINING:
            attempt = f" (attempt {status.attempt + 1})" if status.attempt else ""
            return f"training{attempt}: {status.received} of {status.received + status.asked} updates are in"
        case pb.PHASE_AGGREGATING:
            return f"aggregating {count(status.received, 'update')}"
        case pb.PHASE_VERIFYING:
            return f"trying the step: {count(status.asked, 'client')} still to answer"
        case pb.PHASE_COMMITTING:
            return "committing the step that was chosen"
        case pb.PHASE_EVALUATING:
            return f"evaluating: {count(status.asked, 'client')} still to answer"
        case pb.PHASE_FINISHED:
            return f"finished: {short(view.ended)}" if view.ended else "finished"
    return "starting"
