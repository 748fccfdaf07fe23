"""Durations as people write and read them.

`parse_duration` reads what is typed on a command line, `format_duration` writes what is shown.
"""

from __future__ import annotations

import re
from datetime import timedelta

from fairfleet.common.errors import UsageError

UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days", "w": "weeks"}
LONGEST = timedelta(days=3650)


def parse_duration(text: str) -> timedelta:
    """Return the length of time that a text such as 90d or 12h stands for.

    >>> parse_duration("90d").days, parse_duration("12h").seconds
    (90, 43200)

    Raises UsageError unless it is a whole number with a unit, above 0 and at most ten years.
    """
    match = re.fullmatch(r"([0-9]{1,8})([smhdw])", text)
    length = timedelta(**{UNITS[match[2]]: int(match[1])}) if match else timedelta(0)
    if not timedelta(0) < length <= LONGEST:
        raise UsageError(
            f"{text!r} is not a duration: expected a number and a unit, at most ten years, "
            "for example 90d, 12h, 30m or 45s"
        )
    return length


def format_duration(seconds: float) -> str:
    """Return a number of seconds as text, in the unit that suits its size.

    >>> format_duration(0.0123), format_duration(12.34), format_duration(7325)
    ('12 ms', '12.3 s', '2 h 02 min')
    """
    if seconds < 0.0995:
        return f"{1000 * seconds:.2g} ms"
    if seconds < 59.95:
        return f"{seconds:.2f} s" if seconds < 9.995 else f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s"
