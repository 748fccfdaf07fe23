"""The limits of a federation: those of its settings, or those that an operator continued it with.

A limit that was given to `fairfleet continue` replaces the setting of its time. It holds over
restarts, until the setting itself is changed: then the newer wish counts.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Limits:
    """When a federation ends, apart from its results."""

    rounds: int  # in all
    seconds: float | None = None  # that it may run in all; None: no limit


@dataclass(frozen=True)
class ContinuedLimits:
    """The limits that an operator gave, and those of the settings at that time."""

    settings: Limits
    given: Limits

    def to_json(self) -> str:
        """Return the JSON that the database stores."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> ContinuedLimits:
        """Return the limits that `to_json` wrote."""
        values = json.loads(text)
        return cls(Limits(**values["settings"]), Limits(**values["given"]))


def limits_in_force(settings: Limits, continued: ContinuedLimits | None) -> Limits:
    """Return the limits that hold: each given one, unless its setting was changed since.

    >>> continued = ContinuedLimits(settings=Limits(100, 60.0), given=Limits(150, 90.0))
    >>> limits_in_force(Limits(100, 60.0), continued)
    Limits(rounds=150, seconds=90.0)
    >>> limits_in_force(Limits(120, 60.0), continued)
    Limits(rounds=120, seconds=90.0)
    """
    if continued is None:
        return settings
    before, given = continued.settings, continued.given
    return Limits(
        given.rounds if settings.rounds == before.rounds else settings.rounds,
        given.seconds if settings.seconds == before.seconds else settings.seconds,
    )
