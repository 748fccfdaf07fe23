"""What the table `meta` says of the federation's progress: its time, and how it was continued."""

from __future__ import annotations

import sqlalchemy as sa

from fairfleet.server.rounds.limits import ContinuedLimits
from fairfleet.server.storage.queries import ReadableStore, Write
from fairfleet.server.storage.schema import meta, models
from fairfleet.server.storage.state_database import meta_write

ELAPSED = "elapsed_seconds"
LIMITS = "continued_limits"
COUNTED_AFTER = "evaluations_counted_after"


def elapsed_seconds(store: ReadableStore) -> float:
    """Return for how long the federation has run.

    In a state directory of an older version, it is the time between the first and the newest
    commit.
    """
    if (recorded := _value(store, ELAPSED)) is not None:
        return float(recorded)
    unix = models.c.unix_seconds
    first = sa.select(unix).where(models.c.version == 0)
    newest = sa.select(unix).order_by(models.c.version.desc()).limit(1)
    times = [float(rows[0][0]) for query in (first, newest) if (rows := store.rows(query))]
    return max(0.0, times[-1] - times[0]) if times else 0.0


def elapsed_write(seconds: float) -> Write:
    """Record for how long the federation has run."""
    return meta_write(ELAPSED, repr(seconds))


def continued_limits(store: ReadableStore) -> ContinuedLimits | None:
    """Return the limits that the federation was continued with; None if it was not."""
    text = _value(store, LIMITS)
    return None if text is None else ContinuedLimits.from_json(text)


def continued_limits_write(limits: ContinuedLimits) -> Write:
    """Record the limits that the federation is continued with."""
    return meta_write(LIMITS, limits.to_json())


def counted_after(store: ReadableStore) -> int:
    """Return the version after which evaluations count for the end; -1: all of them do."""
    return int(_value(store, COUNTED_AFTER) or -1)


def counted_after_write(version: int) -> Write:
    """Record that only evaluations of later versions count for the end of the federation."""
    return meta_write(COUNTED_AFTER, str(version))


def _value(store: ReadableStore, key: str) -> str | None:
    rows = store.rows(sa.select(meta.c.value).where(meta.c.key == key))
    return str(rows[0].value) if rows else None
