"""The list of `fairfleet models`: which versions are kept, why, and how the evaluated ones did."""

from __future__ import annotations

import time
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table

from fairfleet.client.operator.formatting import percent
from fairfleet.client.operator.full_tables import print_in_full
from fairfleet.proto.v1 import operator_pb2 as pb

FIGURE_CHARS = 7  # 0.12345 and -1.2e-06 would be longer: a terminal has 80 columns
FITTING_COLUMNS = 8  # in a terminal: four, and two for each of two measures


def models_table(records: Sequence[pb.ModelRecord]) -> Table:
    """Return a table of the versions, with two columns for each measure."""
    table = Table(box=box.SIMPLE_HEAD, header_style="bold", pad_edge=False, padding=0)
    for name in ("version", "size", "committed"):
        table.add_column(name, no_wrap=True)
    table.add_column("kept because", min_width=len("initial"))
    measures = sorted({score.measure for record in records for score in record.scores})
    for measure in measures:
        table.add_column(measure, justify="right", no_wrap=True)
        table.add_column("worst 10 %", justify="right", min_width=len("1.2e-06"))
    has_own = any(record.HasField("server_evaluation") for record in records)
    if has_own:
        table.add_column("on the server", justify="right")
    for record in records:
        table.add_row(*_cells(record, measures), *([_own(record)] if has_own else []))
    return table


def print_models(records: Sequence[pb.ModelRecord], console: Console) -> None:
    """Print the table; with many measures, its lines are longer than the console, but complete."""
    table = models_table(records)
    if len(table.columns) > FITTING_COLUMNS:
        print_in_full(table, console)
    else:
        console.print(table)


def _cells(record: pb.ModelRecord, measures: Sequence[str]) -> list[str]:
    committed = time.strftime("%Y-%m-%d %H:%M", time.localtime(record.unix_seconds))
    cells = [
        str(record.version),
        decimal(record.size_bytes),
        committed,
        " and ".join(record.kept_because),
    ]
    scores = {score.measure: score for score in record.scores}
    for measure in measures:
        score = scores.get(measure)
        values = (score.mean, score.worst_10_percent) if score else ()
        cells += [_figure(measure, value) for value in values] or ["-", "-"]
    return cells


def _figure(measure: str, value: float) -> str:
    if measure == "accuracy":
        return percent(value)
    text = f"{value:.4g}"
    return text if len(text) <= FIGURE_CHARS else f"{value:.2g}"


def _own(record: pb.ModelRecord) -> str:
    """Return how a version does on the server's own test data."""
    evaluation = record.server_evaluation
    if not record.HasField("server_evaluation"):
        return "-"
    if evaluation.HasField("accuracy"):
        return percent(evaluation.accuracy)
    figures = [f"{measure.name} {measure.value:.4g}" for measure in evaluation.measures]
    if evaluation.HasField("loss"):
        figures.insert(0, f"loss {evaluation.loss:.4g}")
    return ", ".join(figures)
