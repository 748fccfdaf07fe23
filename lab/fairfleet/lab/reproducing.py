"""`fairfleet reproduce`: published tables beside what comes out here, and in words what agrees."""

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
from fairfleet.lab import options, tables
from fairfleet.lab.comparing import check_plots
from fairfleet.lab.records import Ledger, Run
from fairfleet.lab.reproductions import LETTERS, reproduction
from fairfleet.lab.reproductions.base import Column, Line, Reproduction, Verdict
from fairfleet.lab.results_page import write_page
from fairfleet.lab.sweep import Means, Planned, finished, run_sweep

USUAL_SEEDS = 2


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
    options.end_on_signals()
    chosen, console = reproduction(name), options.console(as_json)
    planned = selected(chosen, quick, seeds, rules, settings)
    ledger = Ledger(results / f"{(chosen.quick if quick else chosen.sweep).name}.jsonl")
    try:
        run_sweep(planned, ledger, Means(data_dir, workers), None if as_json else console)
    finally:  # also on Ctrl-C: what is there is shown
        if runs := finished(planned, ledger):
            show(chosen, runs, quick, console, as_json)


def write(page: Path, results: Path) -> None:
    check_plots()
    try:
        print(write_page(page, results))
    except OSError as error:
        raise UsageError(f"cannot write {page}: {error.strerror}; give the path of a file") from None


def show_list(as_json: bool) -> None:
    if as_json:
        print(json.dumps({letter: {"name": one.name, "title": one.title} for letter, one in LETTERS.items()}))
    else:
        options.console().print(listing())


def selected(
    chosen: Reproduction, quick: bool, seeds: int | None, rules: list[str], settings: list[str]
) -> list[Planned]:
    sweep = chosen.quick if quick else chosen.sweep
    if seeds is not None and seeds > len(sweep.seeds):
        raise UsageError(f"{sweep.name} has {len(sweep.seeds)} seeds, not {seeds}")
    known = {"rules": {one.label for one in sweep.rules}, "settings": {one.label for one in sweep.settings}}
    for what, asked in (("rules", rules), ("settings", settings)):
        if unknown := set(asked) - known[what]:
            there_are = ", ".join(sorted(known[what] - {""})) or "none to choose from"
            raise UsageError(f"{sweep.name} has no {what} {sorted(unknown)}; there are {there_are}")
    return [
        one
        for one in sweep.planned()
        if one.experiment.seed in sweep.seeds[: seeds or USUAL_SEEDS]
        and (not rules or one.label in rules)
        and (not settings or one.setting in settings)
    ]


def listing() -> Table:
    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0))
    for heading in ("", "name", "table", "rules", "rounds"):
        table.add_column(heading)
    for letter, one in LETTERS.items():
        rounds = str(one.sweep.base["rounds"])
        table.add_row(letter, one.name, one.title, str(len(one.sweep.rules) * len(one.sweep.settings)), rounds)
    return table


def show(chosen: Reproduction, runs: Sequence[Run], quick: bool, console: Console, as_json: bool) -> None:
    lines = chosen.lines(runs)
    verdicts = chosen.verdicts(lines, quick=quick)
    if as_json:
        print(to_json(told(chosen, lines, verdicts), inf_nan_mode="null").decode())
        return
    console.print(Padding(f"[bold]{chosen.title}[/]\n{chosen.about}", (1, 0)))
    if lines:
        console.print(side_by_side(chosen, lines, console.width))
    for verdict in verdicts:
        words = "[green]agrees[/]  " if verdict.holds else "[red]differs[/] "
        console.print(f"{words} {escape(verdict.words)}")
    if quick:
        console.print("A quick run has fewer rounds or seeds than the published one: it is not judged.", style="dim")
    for words in tables.failures(runs):
        console.print(f"[red]failed[/]   {escape(words)}")


def side_by_side(chosen: Reproduction, lines: Sequence[Line], width: int) -> Group:
    """Two rows for each rule: what came out here, and what was published; in as many parts as the width asks for."""
    cells = {column.name: cells_of(lines, column) for column in chosen.columns}
    cells["seconds a run"] = [word for line in lines for word in (f"{line.seconds:.0f}", "")]
    beside = [["  published", *(line.name for line in lines)], ["seeds"]]
    groups = tables.in_groups(((name, [name, *own]) for name, own in cells.items()), beside, width)
    parts = (part(lines, {name: cells[name] for name in group}) for group in groups)
    return Group(*(shown for one in parts for shown in (one, "")))


def cells_of(lines: Sequence[Line], column: Column) -> list[str]:
    """For each rule what came out here, and what was published."""
    found = []
    for line in lines:
        published = line.published.get(column.name)
        found.append(line.measured[column.name].words(column.digits))
        found.append("" if published is None else f"{published:.{column.digits}f}")
    return found


def part(lines: Sequence[Line], cells: Mapping[str, Sequence[str]]) -> Table:
    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0))
    for heading in ("rule", "seeds", *cells):
        table.add_column(heading, justify="left" if heading == "rule" else "right", no_wrap=True)
    for at, line in enumerate(lines):
        table.add_row(Text(line.name), str(line.seeds), *(column[2 * at] for column in cells.values()))
        if any(published := [column[2 * at + 1] for column in cells.values()]):
            table.add_row("  published", "", *published, style="dim")
    return table


def told(chosen: Reproduction, lines: Sequence[Line], verdicts: Sequence[Verdict]) -> dict[str, Any]:
    return {
        "name": chosen.name,
        "rows": [
            {
                "setting": line.setting,
                "rule": line.label,
                "seeds": line.seeds,
                "measured": {name: one.mean for name, one in line.measured.items()},
                "over_seeds": {name: one.deviation for name, one in line.measured.items()},  # null: of one seed
                "published": dict(line.published),
            }
            for line in lines
        ],
        "verdicts": [verdict._asdict() for verdict in verdicts],
    }
