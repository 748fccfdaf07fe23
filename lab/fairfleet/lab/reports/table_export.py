"""Result rows for other programs: JSON and CSV with full names and six digits."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from typing import Any

from fairfleet.lab.reports.result_rows import ResultRow

DIGITS = 6


def as_json(rows: Sequence[ResultRow]) -> list[dict[str, Any]]:
    """Return one object per row. A value that is not finite becomes None."""
    return [
        {
            "setting": row.setting,
            "rule": row.label,
            "seeds": list(row.seeds),
            "seconds": round(row.seconds, 3),
            "failures": list(row.failures),
            **{name: json_number(value.mean) for name, value in row.measures.items()},
            **{
                f"{name}_over_seeds": json_number(value.deviation)
                for name, value in row.measures.items()
            },
        }
        for row in rows
    ]


def as_csv(rows: Sequence[ResultRow]) -> str:
    """Return the same fields as CSV, with the numbers of seeds and failures instead of lists."""
    lines = [
        {**line, "seeds": len(line["seeds"]), "failures": len(line["failures"])}
        for line in as_json(rows)
    ]
    text = io.StringIO()
    if lines:
        writer = csv.DictWriter(text, list(lines[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines)
    return text.getvalue()


def json_number(value: float) -> float | None:
    """Return the value rounded for JSON; None if it is not finite."""
    return round(value, DIGITS) if math.isfinite(value) else None
