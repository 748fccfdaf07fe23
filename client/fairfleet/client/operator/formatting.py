"""Numbers and states as text, the same wherever people read them."""

from __future__ import annotations

from fairfleet.client.operator.fleet_view import FleetView
from fairfleet.common.cli.event_text import count
from fairfleet.common.errors import short
from fairfleet.proto.v1 import operator_pb2 as pb


def percent(share: float) -> str:
    """Return a share between 0 and 1 as a percentage with one decimal."""
    return f"{100 * share:.1f} %"


def round_of(view: FleetView) -> str:
    """Return which round is under way, counted from one, or how many are done.

    Version 3 of 100 means that the fourth round is under way.
    """
    status = view.status
    if view.finished:
        return f"{count(status.version, 'round')} of {status.rounds_planned:,} done"
    return f"round {min(status.version + 1, status.rounds_planned):,} of {status.rounds_planned:,}"


def phase(view: FleetView) -> str:
    """Return what the federation does at the moment."""
    status = view.status
    if view.trouble:
        return "the server does not answer; trying again"
    match status.phase:
        case pb.PHASE_WAITING:
            return _waiting(status)
        case pb.PHASE_TRAINING:
            attempt = f" (attempt {status.attempt + 1})" if status.attempt else ""
            expected = status.received + status.asked
            return f"training{attempt}: received {status.received} of {expected} updates"
        case pb.PHASE_AGGREGATING:
            return f"aggregating {count(status.received, 'update')}"
        case pb.PHASE_VERIFYING:
            return f"trying the step: waiting for {count(status.asked, 'client')}"
        case pb.PHASE_COMMITTING:
            return "committing the chosen step"
        case pb.PHASE_EVALUATING:
            return f"evaluating: waiting for {count(status.asked, 'client')}"
        case pb.PHASE_FINISHED:
            return f"finished: {short(view.ended)}" if view.ended else "finished"
    return "starting"


def _waiting(status: pb.StatusResponse) -> str:
    if status.held_because:
        return f"no round begins: {short(status.held_because, 400)}"
    if status.paused:
        return "paused; `fairfleet resume` continues"
    if status.missing:
        return f"waiting for {count(status.missing, 'more client')}"
    return "about to start a round"
