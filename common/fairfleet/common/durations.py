"""Durations as people write them."""

from __future__ import annotations

import re
from datetime import timedelta

from fairfleet.common.errors import UsageError

UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days", "w": "weeks"}
LONGEST = timedelta(days=3650)


def duration(text: str) -> timedelta:
    """
    >>> duration("90d").days, duration("12h").seconds
    (90, 43200)
    """
    found = re.fullmatch(r"([0-9]{1,8})([smhdw])", text)
    length = timedelta(**{UNITS[found[2]]: int(found[1])}) if found else timedelta(0)
    if not timedelta(0) < length <= LONGEST:
        raise UsageError(f"{text!r} is no duration: give a number and a unit, for example 90d, 12h, 30m or 45s")
    return length
