"""Which rounds still count after the federation went back to an earlier version.

Round n that goes back to version V commits version n + 1 with the model of V. Versions go on
growing, so receipts and the clients' files stay valid. The rounds that V does not build on are
undone: their records stay, but nothing that they computed counts any more.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from fairfleet.server.storage.queries import ReadableStore, Write
from fairfleet.server.storage.schema import history, meta, rounds

RETURNS = "went_back"  # key of `meta`: JSON, the version gone back to by round

Ranges = list[tuple[int, int]]  # of rounds: the first and the last of each


def stands(column: sa.ColumnElement[int]) -> sa.ColumnElement[bool]:
    """Return the condition that a column's round is not undone."""
    undone = sa.select(rounds.c.round).where(rounds.c.undone_by.is_not(None))
    return column.not_in(undone)


def undone_rounds(store: ReadableStore) -> frozenset[int]:
    """Return the rounds that are undone."""
    query = sa.select(rounds.c.round).where(rounds.c.undone_by.is_not(None))
    return frozenset(int(row.round) for row in store.rows(query))


def rounds_left_out(store: ReadableStore) -> frozenset[int]:
    """Return the rounds that are undone, and those that went back: no update of them counts."""
    return undone_rounds(store) | returns(store).keys()


def returns(store: ReadableStore) -> dict[int, int]:
    """Return, by round that went back, the version that it went back to."""
    rows = store.rows(sa.select(meta.c.value).where(meta.c.key == RETURNS))
    recorded = json.loads(rows[0].value) if rows else {}
    return {int(number): version for number, version in recorded.items()}


def standing_ranges(version: int, returned: Mapping[int, int]) -> Ranges:
    """Return the rounds that a version builds on, newest first.

    >>> standing_ranges(5, {})
    [(0, 4)]
    >>> standing_ranges(13, {10: 6})  # round 10 went back to version 6
    [(10, 12), (0, 5)]
    >>> standing_ranges(8, {10: 6})  # of the rounds that were undone
    [(0, 7)]
    """
    ranges: Ranges = []
    while version > 0:
        began = max((number for number in returned if number < version), default=None)
        if began is None:
            return [*ranges, (0, version - 1)]
        ranges.append((began, version - 1))
        version = returned[began]
    return ranges


def going_back_write(number: int, version: int, returned: Mapping[int, int]) -> Write:
    """Record that a round goes back to a version, and undo the rounds it does not build on.

    Rounds that were undone stand again if the version builds on them. Rows of the history that
    undone rounds computed are dropped.
    """
    ranges = standing_ranges(version, returned)
    recorded = json.dumps({**returned, number: version})

    def write(connection: Connection) -> None:
        is_standing = _within(rounds.c.round, ranges)
        earlier = rounds.c.round < number
        connection.execute(rounds.update().where(is_standing).values(undone_by=None))
        connection.execute(
            rounds.update()
            .where(earlier, rounds.c.undone_by.is_(None), sa.not_(is_standing))
            .values(undone_by=number)
        )
        connection.execute(history.delete().where(sa.not_(_within(history.c.round, ranges))))
        connection.execute(meta.delete().where(meta.c.key == RETURNS))
        connection.execute(meta.insert().values(key=RETURNS, value=recorded))

    return write


def _within(column: sa.ColumnElement[int], ranges: Ranges) -> sa.ColumnElement[Any]:
    return sa.or_(sa.false(), *(column.between(first, last) for first, last in ranges))
