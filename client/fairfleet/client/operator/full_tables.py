"""Print tables of which no cell is cut, also where a terminal is narrow or the output is a file."""

from __future__ import annotations

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

MOST_CHARS = 10_000  # in a line


def print_in_full(table: Table, console: Console) -> None:
    """Print a table: with narrower gaps where it is too wide, and then with longer lines."""
    if _width(table, console) > console.width:
        table.padding = 0
    console.width = max(console.width, _width(table, console))
    console.print(table)


def _width(table: Table, console: Console) -> int:
    unlimited = console.options.update_width(MOST_CHARS)
    return Measurement.get(console, unlimited, table).maximum
