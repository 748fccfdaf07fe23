"""`fairfleet reproduce`: run published tables again and show both side by side.

Verdicts in words say where the figures agree.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic_core import to_json
from rich.console import Console, Group
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from fairfleet.common.errors import UsageError
from fairfleet.lab.cli import options
from fairfleet.lab.cli.compare import check_plots
from fairfleet.lab.experiments.run_log import Ledger, Run
from fairfleet.lab.experiments.sweep import PlannedRun, Sweep
from fairfleet.lab.experiments.sweep_runner import RunResources, recorded_runs, run_sweep
from fairfleet.lab.reports.column_groups import column_groups
from fairfleet.lab.reports.result_rows import failed_runs
from fairfleet.lab.reproductions import LETTERS, reproduction
from fairfleet.lab.reproductions.base import ClaimVerdict, Column, Reproduction, TableLine
from fairfleet.lab.reproductions.results_page import write_page

DEFAULT_SEEDS = 2


def reproduce(
    name: str,
    quick: bool,
    seeds: int | None,
    rules: list[str],
    settings: list[str],
    results: Path,
    data_dir: Path | None,
    workers: int,
    as_json: bool,
) -> None:
    """Run the selected part of a published table and print the comparison.

    `results` is the folder of the records; a run that is recorded there is not run again.
    """
    options.end_on_signals()
    chosen, console = reproduction(name), options.console(as_json)
    planned = select_runs(chosen, quick, seeds, rules, settings)
    ledger = Ledger(results / f"{(chosen.quick if quick else chosen.sweep).name}.jsonl")
    try:
        run_sweep(planned, ledger, RunResources(data_dir, workers), None if as_json else console)
    finally:  # Also on Ctrl-C, so that the runs so far are shown.
        if runs := recorded_runs(planned, ledger):
            show(chosen, runs, quick, console, as_json)


def write(page: Path, results: Path) -> None:
    """Write the page of all results from their records. Raise UsageError if it cannot be."""
    check_plots()
    try:
        print(write_page(page, results))
    except OSError as error:
        raise UsageError(
            f"cannot write {page}: {error.strerror}; give the path of a file"
        ) from None


def show_list(as_json: bool) -> None:
    """Print the tables that can be reproduced."""
    if as_json:
        names = {
            letter: {"name": published.name, "title": published.title}
            for letter, published in LETTERS.items()
        }
        print(json.dumps(names))
    else:
        options.console().print(listing())


def select_runs(
    chosen: Reproduction, quick: bool, seeds: int | None, rules: list[str], settings: list[str]
) -> list[PlannedRun]:
    """Return the runs with these rules and settings, or with all, and the first seeds.

    Raise UsageError for more seeds than the sweep has and for names that it does not have.
    """
    sweep = chosen.quick if quick else chosen.sweep
    if seeds is not None and seeds > len(sweep.seeds):
        raise UsageError(f"{sweep.name} has {len(sweep.seeds)} seeds, not {seeds}")
    _check_names(sweep, "rules", rules, {rule.label for rule in sweep.rules})
    _check_names(sweep, "settings", settings, {setting.label for setting in sweep.settings})
    return [
        run
        for run in sweep.planned()
        if run.experiment.seed in sweep.seeds[: seeds or DEFAULT_SEEDS]
        and (not rules or run.label in rules)
        and (not settings or run.setting in settings)
    ]


def _check_names(sweep: Sweep, kind: str, names: list[str], existing: set[str]) -> None:
    if unknown := set(names) - existing:
        choices = ", ".join(sorted(existing - {""})) or "none to choose from"
        raise UsageError(f"{sweep.name} has no {kind} {sorted(unknown)}; there are {choices}")


def listing() -> Table:
    """Return the tables that can be reproduced, as a terminal table."""
    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0))
    for heading in ("", "name", "table", "rules", "rounds"):
        table.add_column(heading)
    for letter, published in LETTERS.items():
        sweep = published.sweep
        rules = str(len(sweep.rules) * len(sweep.settings))
        table.add_row(letter, published.name, published.title, rules, str(sweep.base["rounds"]))
    return table


def show(
    chosen: Reproduction, runs: Sequence[Run], quick: bool, console: Console, as_json: bool
) -> None:
    """Print both tables and the verdicts, or one JSON object."""
    lines = chosen.lines(runs)
    verdicts = chosen.verdicts(lines, quick=quick)
    if as_json:
        report = comparison_json(chosen, lines, verdicts)
        print(to_json(report, inf_nan_mode="null").decode())
        return
    console.print(Padding(f"[bold]{chosen.title}[/]\n{chosen.about}", (1, 0)))
    if lines:
        console.print(side_by_side(chosen, lines, console.width))
    for verdict in verdicts:
        mark = "[green]agrees[/]  " if verdict.holds else "[red]differs[/] "
        console.print(f"{mark} {escape(verdict.words)}")
    if quick:
        console.print(
            "A quick run has fewer rounds or seeds than the published one: it is not judged.",
            style="dim",
        )
    for text in failed_runs(runs):
        console.print(f"[red]failed[/]   {escape(text)}")


def side_by_side(chosen: Reproduction, lines: Sequence[TableLine], width: int) -> Group:
    """Return two rows per rule, measured and published, in as many tables as the width needs."""
    cells = {column.name: column_cells(lines, column) for column in chosen.columns}
    cells["seconds a run"] = [cell for line in lines for cell in (f"{line.seconds:.0f}", "")]
    groups = column_groups(
        ((name, [name, *texts]) for name, texts in cells.items()),
        [["  published", *(line.name for line in lines)], ["seeds"]],
        width,
    )
    tables = (comparison_table(lines, {name: cells[name] for name in group}) for group in groups)
    return Group(*(renderable for table in tables for renderable in (table, "")))


def column_cells(lines: Sequence[TableLine], column: Column) -> list[str]:
    """Return two cells per rule: the measured figure and the published one."""
    cells = []
    for line in lines:
        published = line.published.get(column.name)
        cells.append(line.measured[column.name].format(column.digits))
        cells.append("" if published is None else f"{published:.{column.digits}f}")
    return cells


def comparison_table(lines: Sequence[TableLine], cells: Mapping[str, Sequence[str]]) -> Table:
    """Return the table of these columns; `cells` alternate between measured and published."""
    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0))
    for heading in ("rule", "seeds", *cells):
        table.add_column(heading, justify="left" if heading == "rule" else "right", no_wrap=True)
    for index, line in enumerate(lines):
        measured = [column[2 * index] for column in cells.values()]
        published = [column[2 * index + 1] for column in cells.values()]
        table.add_row(Text(line.name), str(line.seeds), *measured)
        if any(published):
            table.add_row("  published", "", *published, style="dim")
    return table


def comparison_json(
    chosen: Reproduction, lines: Sequence[TableLine], verdicts: Sequence[ClaimVerdict]
) -> dict[str, Any]:
    """Return the comparison for `--json`. The deviation over a single seed is NaN."""
    return {
        "name": chosen.name,
        "rows": [
            {
                "setting": line.setting,
                "rule": line.label,
                "seeds": line.seeds,
                "measured": {name: value.mean for name, value in line.measured.items()},
                "over_seeds": {name: value.deviation for name, value in line.measured.items()},
                "published": dict(line.published),
            }
            for line in lines
        ],
        "verdicts": [verdict._asdict() for verdict in verdicts],
    }
