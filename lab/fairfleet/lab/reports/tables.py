"""Result rows as tables for a terminal.

A table that is too wide is divided into several, so that no figure is cut. The best value of each
setting is bold.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from fairfleet.lab.reports.column_groups import column_groups
from fairfleet.lab.reports.measures import TableMeasure
from fairfleet.lab.reports.result_rows import ResultRow, measures_shown


def table(rows: Sequence[ResultRow], width: int = 200) -> Group:
    """Return the tables of all settings for a terminal of this width, in characters."""
    parts: list[RenderableType] = []
    for setting in dict.fromkeys(row.setting for row in rows):
        setting_rows = [row for row in rows if row.setting == setting]
        parts += [Text(setting, "bold")] if setting else []
        for measures in _measure_groups(setting_rows, width):
            parts += [_table(setting_rows, measures), ""]
    return Group(*parts)


def _measure_groups(rows: Sequence[ResultRow], width: int) -> Iterator[list[TableMeasure]]:
    """Yield the measures in groups whose columns fit next to the names of the rules."""
    columns = [
        (
            measure,
            [
                measure.heading,
                *(row.measures[measure.name].format(measure.digits) for row in rows),
            ],
        )
        for measure in measures_shown(rows)
    ]
    first_columns = [
        ["rule", *(row.label for row in rows)],
        ["seeds", *(row.seeds_text for row in rows)],
    ]
    return column_groups(columns, first_columns, width)


def _table(rows: Sequence[ResultRow], measures: Sequence[TableMeasure]) -> Table:
    rendered = Table(box=None, header_style="dim", padding=(0, 2, 0, 0))
    for heading in ("rule", "seeds"):
        rendered.add_column(heading, no_wrap=True)
    for measure in measures:
        rendered.add_column(measure.heading, justify="right", no_wrap=True)
    for row in rows:
        cells = [_cell(row, measure, rows) for measure in measures]
        rendered.add_row(Text(row.label), row.seeds_text, *cells)
    return rendered


def _cell(row: ResultRow, measure: TableMeasure, rows: Sequence[ResultRow]) -> str:
    """Return the figure of a row, bold if it is the best of several rows."""
    figure = row.measures[measure.name]
    means = [rival.measures[measure.name].mean for rival in rows]
    better = measure.better * (row.sign if measure.is_judged else 1)
    best = max((better * mean for mean in means if math.isfinite(mean)), default=math.nan)
    text = figure.format(measure.digits)
    return f"[bold]{text}[/]" if len(rows) > 1 and better * figure.mean == best else text
