"""`fairfleet compare`: rules against each other, over seeds and settings, as tables and pictures."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

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
    console = options.console(as_json)
    runs = run_and_write(sweep, folder, Means(data_dir, workers), None if as_json else console, pictures)
    found, pairs = tables.rows(runs), paired.rows(runs) if len(sweep.codecs) > 1 else []
    if as_json:
        told = {"name": sweep.name, "folder": str(folder), "rows": tables.as_json(found)}
        print(json.dumps(told | ({"codecs": paired.as_json(pairs)} if pairs else {})))
    else:
        console.print(tables.table(found, console.width))
        if pairs:
            console.print(paired.table(pairs))
        console.print(f"records, tables and pictures: {folder}", style="dim")


def run_and_write(sweep: Sweep, folder: Path, means: Means, console: Console | None, pictures: bool) -> list[Run]:
    planned, ledger = list(sweep.planned()), Ledger(folder / "runs.jsonl")
    try:
        run_sweep(planned, ledger, means, console)
    finally:  # also on Ctrl-C: what is there is shown
        runs = finished(planned, ledger)
        if runs:
            write(sweep.name, planned, runs, folder, pictures)
    return runs


def write(name: str, planned: Sequence[Planned], runs: Sequence[Run], folder: Path, pictures: bool) -> None:
    found = tables.rows(runs)
    (folder / "table.csv").write_text(tables.as_csv(found), encoding="utf-8")
    (folder / "table.json").write_text(json.dumps(tables.as_json(found), indent=1) + "\n", encoding="utf-8")
    if not pictures:
        return
    from fairfleet.lab import plots, report

    done = [run for run in runs if run.complete]
    remark = f"{len(done)} of {len(planned)} runs, {sum(run.rounds for run in done)} rounds in all."
    (folder / "report.html").write_text(report.page(f"Comparison {name}", done, remark), encoding="utf-8")
    plots.draw(done, folder, name)


def check_plots() -> None:
    missing = [name for name in ("matplotlib", "plotly") if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError(
            f"reports and pictures need {' and '.join(missing)}: pip install 'fairfleet[plots]', or use --no-pictures"
        )
