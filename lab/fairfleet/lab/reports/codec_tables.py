"""Codec comparisons as terminal tables, as Markdown and as JSON."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from fairfleet.lab.reports.codec_comparison import RAW, CodecRow
from fairfleet.lab.reports.column_groups import column_groups
from fairfleet.lab.reports.table_export import json_number

HEADINGS = (
    "rule",
    "codec",
    "seeds",
    "MB a round",
    "of raw",
    "average",
    "σ",
    "worst 10 %",
    "Δ average",
    "Δ worst 10 %",
    "Δ late average",
    "Δ late worst 10 %",
    "Gram error",
    "flipped",
    "verdict",
)
TEXT_COLUMNS = ("rule", "codec", "verdict")  # aligned left
# A terminal shows these in the table of accuracies above.
NOT_IN_TERMINAL = ("MB a round", "average", "σ", "worst 10 %")


def cells(row: CodecRow) -> list[str]:
    """Return the texts of a row, one for each heading."""
    spreads = (row.average, row.deviation, row.worst_10)
    return [
        row.label,
        row.codec,
        str(len(row.seeds)),
        _format(row.round_bytes / 1e6, ".3f"),
        _format(row.ratio, ".4f"),
        *(_format(value.mean, ".2f") or "-" for value in spreads),
        *(value.format() if row.codec != RAW else "" for value in row.differences),
        _format(row.gram_error, ".3g"),
        _format(100 * row.flipped, ".1f", " %"),
        row.verdict,
    ]


def _format(value: float, spec: str, unit: str = "") -> str:
    return f"{value:{spec}}{unit}" if math.isfinite(value) else ""


def table(rows: Sequence[CodecRow], width: int = 200) -> Group:
    """Return the tables for a terminal of this width, in characters."""
    columns = {
        heading: [cells(row)[index] for row in rows]
        for index, heading in enumerate(HEADINGS)
        if heading not in NOT_IN_TERMINAL
    }
    columns["rule"] = [f"{row.setting} {row.label}".strip() for row in rows]
    first = {heading: columns.pop(heading) for heading in ("rule", "codec", "seeds")}
    groups = column_groups(
        ((heading, [heading, *texts]) for heading, texts in columns.items()),
        [[heading, *texts] for heading, texts in first.items()],
        width,
    )
    return Group(
        *(_table(first | {heading: columns[heading] for heading in group}) for group in groups)
    )


def _table(columns: Mapping[str, Sequence[str]]) -> Table:
    rendered = Table(box=None, header_style="dim", padding=(0, 2, 0, 0))
    for heading in columns:
        rendered.add_column(
            heading, justify="left" if heading in TEXT_COLUMNS else "right", no_wrap=True
        )
    for line in zip(*columns.values(), strict=True):
        rendered.add_row(*map(Text, line))
    return rendered


def markdown(rows: Sequence[CodecRow]) -> Iterator[str]:
    """Yield the lines of one Markdown table per setting."""
    for setting in dict.fromkeys(row.setting for row in rows):
        if setting:
            yield f"**{setting}**\n"
        yield f"| {' | '.join(HEADINGS)} |"
        yield f"|{'---|' * len(HEADINGS)}"
        for row in rows:
            if row.setting == setting:
                yield f"| {' | '.join(cells(row))} |"
        yield ""


def as_json(rows: Sequence[CodecRow]) -> list[dict[str, Any]]:
    """Return one object per row. A value that is not finite becomes None."""
    return [_row_json(row) for row in rows]


def _row_json(row: CodecRow) -> dict[str, Any]:
    numbers = ("round_bytes", "ratio", "gram_error", "flipped")
    spreads = ("average", "deviation", "worst_10")
    differences = {
        "average_difference": row.average_difference,
        "worst_10_difference": row.worst_difference,
        "late_average_difference": row.late_average_difference,
        "late_worst_10_difference": row.late_worst_difference,
    }
    return {
        "setting": row.setting,
        "rule": row.label,
        "codec": row.codec,
        "seeds": list(row.seeds),
        **{name: json_number(getattr(row, name)) for name in numbers},
        **{name: json_number(getattr(row, name).mean) for name in spreads},
        **{name: [json_number(part) for part in value] for name, value in differences.items()},
        "verdict": row.verdict,
    }
