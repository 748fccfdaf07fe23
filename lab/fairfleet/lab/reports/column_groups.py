"""Divide the columns of a wide table into groups that fit a terminal.

Each group is printed as a table of its own, after the same first columns. No column is shortened.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")
PADDING = 2  # spaces after a column


def column_groups(
    columns: Iterable[tuple[T, Sequence[str]]],
    first_columns: Iterable[Sequence[str]],
    width: int,
) -> Iterator[list[T]]:
    """Yield the columns in groups, each of which fits the width together with the first columns.

    A column is an identifier and its texts, heading included. A group has at least one column,
    even if this one is too wide.
    """
    first_width = sum(map(_column_width, first_columns))
    group, used = list[T](), first_width
    for column, texts in columns:
        if group and used + _column_width(texts) > width:
            yield group
            group, used = [], first_width
        group.append(column)
        used += _column_width(texts)
    yield group


def _column_width(texts: Sequence[str]) -> int:
    return max(map(len, texts)) + PADDING
