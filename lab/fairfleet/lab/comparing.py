"""`fairfleet compare`: rules against each other, over seeds and settings, as tables and pictures."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from fairfleet.common.errors import UsageError
from fairfleet.common.settings import read_model
from fairfleet.lab import options, paired, tables
from fairfleet.lab.records import Ledger, Run
from fairfleet.lab.sweep import Means, Planned, Sweep, finished, run_sweep


def compare(
    config: Path | None,
    given: dict[str, Any],
    output: Path | None,
    data_dir: Path | None,
    workers: int,
    pictures: bool,
    as_json: bool,
) -> None:
    options.end_on_signals()
    sweep = read_model(Sweep, config, given)
    folder = output or Path("fairfleet-results") / sweep.name
    if pictures:
        check_plots()
    check_flags(sweep, [path.removeprefix("base.") for path in given if path.startswith("base.")])
    console, planned, ledger = options.console(as_json), list(sweep.planned()), Ledger(folder / "runs.jsonl")
    try:
        run_sweep(planned, ledger, Means(data_dir, workers), None if as_json else console)
    finally:  # also on Ctrl-C: what is there is shown
        if runs := finished(planned, ledger):
            show(sweep, planned, runs, folder, console, as_json)
            write(sweep.name, planned, runs, folder, pictures)


def check_flags(sweep: Sweep, paths: Sequence[str]) -> None:
    """A flag changes what all runs have in common: it would do nothing where rules or settings say the same field."""
    for path in paths:
        if own := [one.label for one in (*sweep.rules, *sweep.settings) if says(one.changes, path)]:
            raise UsageError(f"{path} is given, but the sweep's {', '.join(own)} say it themselves; change it there")


def says(changes: Mapping[str, Any], path: str) -> bool:
    name, _, rest = path.partition(".")
    inner = changes.get(name)
    return name in changes and (not rest or not isinstance(inner, Mapping) or says(inner, rest))


def show(
    sweep: Sweep, planned: Sequence[Planned], runs: Sequence[Run], folder: Path, console: Console, as_json: bool
) -> None:
    found, pairs = tables.rows(runs), paired.rows(runs) if len(sweep.codecs) > 1 else []
    if as_json:
        counts = {"runs_planned": len(planned), "runs_done": sum(run.complete for run in runs)}
        told = {"name": sweep.name, "folder": str(folder), **counts, "rows": tables.as_json(found)}
        print(json.dumps(told | ({"codecs": paired.as_json(pairs)} if pairs else {})))
        return
    console.print(tables.table(found, console.width))
    if pairs:
        console.print(paired.table(pairs, console.width))
    for words in tables.failures(runs):
        console.print(f"[red]failed[/] {escape(words)}")
    done = sum(run.complete for run in runs)
    if done < len(planned):
        console.print(f"[bold]stopped[/] after {done} of {len(planned)} runs; the same command goes on")
    console.print(f"records, tables and pictures: {escape(str(folder))}", style="dim")


def write(name: str, planned: Sequence[Planned], runs: Sequence[Run], folder: Path, pictures: bool) -> None:
    try:
        write_tables(runs, folder)
        if pictures:
            draw(name, planned, [run for run in runs if run.complete], folder)
    except OSError as error:
        raise UsageError(
            f"cannot write {error.filename}: {error.strerror}. The runs are kept; give another --output, or mend this "
            "one and run the same command"
        ) from None


def write_tables(runs: Sequence[Run], folder: Path) -> None:
    found = tables.rows(runs)
    (folder / "table.csv").write_text(tables.as_csv(found), encoding="utf-8")
    (folder / "table.json").write_text(json.dumps(tables.as_json(found), indent=1) + "\n", encoding="utf-8")


def draw(name: str, planned: Sequence[Planned], done: Sequence[Run], folder: Path) -> None:
    from fairfleet.lab import plots, report

    failed = sum(bool(run.failure) for run in done)
    remark = f"{len(done)} of {len(planned)} runs, {sum(run.rounds for run in done)} rounds in all"
    remark += f"; {failed} of them failed." if failed else "."
    (folder / "report.html").write_text(report.page(f"Comparison {name}", done, remark), encoding="utf-8")
    plots.draw(done, folder, name)


def check_plots() -> None:
    missing = [name for name in ("matplotlib", "plotly") if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError(
            f"reports and pictures need {' and '.join(missing)}: pip install 'fairfleet[plots]', or use --no-pictures"
        )
