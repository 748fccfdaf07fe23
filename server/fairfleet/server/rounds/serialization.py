"""Rounds and events as the database stores them: one line of JSON each.

Events carry the name of their class. Rounds and events of older versions stay readable.
"""

from __future__ import annotations

import json
from dataclasses import asdict

from fairfleet.server.rounds.state_machine import EVENTS, Event, Phase, Round

# A set that an older version did not store is empty.
SETS = ("asked", "received", "lost", "late", "retried", "gave_up", "surplus")


def event_to_json(event: Event) -> str:
    """Return an event as JSON, with sets as sorted lists."""
    fields = {
        key: sorted(value) if isinstance(value, frozenset) else value
        for key, value in asdict(event).items()
    }
    return json.dumps({"event": type(event).__name__, **fields})


def event_from_json(text: str) -> Event:
    """Return the event that `event_to_json` wrote."""
    fields = json.loads(text)
    kind = EVENTS[fields.pop("event")]
    event: Event = kind(
        **{
            key: frozenset(value) if isinstance(value, list) else value
            for key, value in fields.items()
        }
    )
    return event


def round_to_json(round_: Round) -> str:
    """Return a round as JSON, with sets as sorted lists."""
    fields = {
        key: sorted(value) if isinstance(value, frozenset) else value
        for key, value in asdict(round_).items()
    }
    return json.dumps({**fields, "phase": round_.phase.value})


def round_from_json(text: str) -> Round:
    """Return the round that `round_to_json` wrote, perhaps in an older version."""
    fields = json.loads(text)
    sets = {key: frozenset(fields.get(key, ())) for key in SETS}
    return Round(**{**fields, **sets, "phase": Phase(fields["phase"])})
