"""Rounds and their events as the journal keeps them: one line of JSON each."""

from __future__ import annotations

import json
from dataclasses import asdict

from fairfleet.server.rounds import EVENTS, Event, Phase, Round


def event_to_json(event: Event) -> str:
    fields = {key: sorted(value) if isinstance(value, frozenset) else value for key, value in asdict(event).items()}
    return json.dumps({"event": type(event).__name__, **fields})


def event_from_json(text: str) -> Event:
    fields = json.loads(text)
    kind = EVENTS[fields.pop("event")]
    event: Event = kind(
        **{key: frozenset(value) if isinstance(value, list) else value for key, value in fields.items()}
    )
    return event


def round_to_json(round: Round) -> str:
    fields = {key: sorted(value) if isinstance(value, frozenset) else value for key, value in asdict(round).items()}
    return json.dumps({**fields, "phase": round.phase.value})


def round_from_json(text: str) -> Round:
    fields = json.loads(text)
    sets = {key: frozenset(fields.get(key, ())) for key in ("asked", "received", "lost", "late")}
    return Round(**{**fields, **sets, "phase": Phase(fields["phase"])})
