"""Pieces of Markdown that several generated pages use."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

# What a type is called on a page.
NAMES = {str: "text", int: "integer", float: "number", bool: "true or false", Path: "path"}

GENERATED = "<!-- Written by `make reference` from the code. Do not edit it. -->\n"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines of a table."""
    return [_line(header), _line(["---"] * len(header)), *map(_line, rows)]


def cell(text: str) -> str:
    """Return a text that may stand in a cell: one line, without a cell's border."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"
