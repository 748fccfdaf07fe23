"""`fairfleet compare`: compare rules over seeds and settings, as tables and charts.

Everything is written to one folder. What is recorded there is shown and written even if the
comparison is interrupted.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from fairfleet.common.cli.settings import read_model
from fairfleet.common.errors import UsageError
from fairfleet.common.extras import require
from fairfleet.lab.cli import options
from fairfleet.lab.experiments.run_log import Ledger, Run
from fairfleet.lab.experiments.sweep import PlannedRun, Sweep
from fairfleet.lab.experiments.sweep_runner import RunResources, recorded_runs, run_sweep
from fairfleet.lab.reports import codec_tables, table_export, tables
from fairfleet.lab.reports.codec_comparison import codec_rows
from fairfleet.lab.reports.result_rows import failed_runs, result_rows


def compare(
    config: Path | None,
    flags: dict[str, Any],
    output: Path | None,
    data_dir: Path | None,
    workers: int,
    pictures: bool,
    as_json: bool,
) -> None:
    """Run the sweep of a YAML file and flags, print its tables and write its folder."""
    options.end_on_signals()
    sweep = read_model(Sweep, config, flags)
    folder = output or Path("fairfleet-results") / sweep.name
    if pictures:
        check_plots()
    check_flags(sweep, [path.removeprefix("base.") for path in flags if path.startswith("base.")])
    console, planned = options.console(as_json), list(sweep.planned())
    ledger = Ledger(folder / "runs.jsonl")
    try:
        run_sweep(planned, ledger, RunResources(data_dir, workers), None if as_json else console)
    finally:  # Also on Ctrl-C, so that the runs so far are shown.
        if runs := recorded_runs(planned, ledger):
            show(sweep, planned, runs, folder, console, as_json)
            write(sweep.name, planned, runs, folder, pictures)


def check_flags(sweep: Sweep, paths: Sequence[str]) -> None:
    """Raise UsageError for a flag that a rule or setting of the sweep would override.

    A flag changes what all runs share, so it would have no effect there.
    """
    for path in paths:
        variants = (*sweep.rules, *sweep.settings)
        if labels := [variant.label for variant in variants if sets_field(variant.changes, path)]:
            raise UsageError(
                f"{path} is given, but {', '.join(labels)} of the sweep also set it; "
                "change it in the sweep"
            )


def sets_field(changes: Mapping[str, Any], path: str) -> bool:
    """Return whether the changes set the field at this dotted path, or something inside it."""
    name, _, rest = path.partition(".")
    inner = changes.get(name)
    return name in changes and (
        not rest or not isinstance(inner, Mapping) or sets_field(inner, rest)
    )


def show(
    sweep: Sweep,
    planned: Sequence[PlannedRun],
    runs: Sequence[Run],
    folder: Path,
    console: Console,
    as_json: bool,
) -> None:
    """Print the tables, or one JSON object; with several codecs also their comparison."""
    rows, paired_rows = result_rows(runs), codec_rows(runs) if len(sweep.codecs) > 1 else []
    done = sum(run.complete for run in runs)
    if as_json:
        counts = {"runs_planned": len(planned), "runs_done": done}
        summary = {"name": sweep.name, "folder": str(folder), **counts}
        codecs = {"codecs": codec_tables.as_json(paired_rows)} if paired_rows else {}
        print(json.dumps({**summary, "rows": table_export.as_json(rows), **codecs}))
        return
    console.print(tables.table(rows, console.width))
    if paired_rows:
        console.print(codec_tables.table(paired_rows, console.width))
    for text in failed_runs(runs):
        console.print(f"[red]failed[/] {escape(text)}")
    if done < len(planned):
        progress = f"after {done} of {len(planned)} runs"
        console.print(f"[bold]stopped[/] {progress}; the same command continues")
    console.print(f"records, tables and charts: {escape(str(folder))}", style="dim")


def write(
    name: str, planned: Sequence[PlannedRun], runs: Sequence[Run], folder: Path, pictures: bool
) -> None:
    """Write tables and charts to the folder. Raise UsageError if a file cannot be written."""
    try:
        write_tables(runs, folder)
        if pictures:
            draw(name, planned, [run for run in runs if run.complete], folder)
    except OSError as error:
        raise UsageError(
            f"cannot write {error.filename}: {error.strerror}. The runs are recorded; fix this "
            "path or give another --output, and run the same command again"
        ) from None


def write_tables(runs: Sequence[Run], folder: Path) -> None:
    """Write table.csv and table.json."""
    rows = result_rows(runs)
    (folder / "table.csv").write_text(table_export.as_csv(rows), encoding="utf-8")
    text = json.dumps(table_export.as_json(rows), indent=1)
    (folder / "table.json").write_text(f"{text}\n", encoding="utf-8")


def draw(name: str, planned: Sequence[PlannedRun], done: Sequence[Run], folder: Path) -> None:
    """Write the HTML report and the PNG charts."""
    from fairfleet.lab.reports import html_report, png_charts

    failed = sum(bool(run.failure) for run in done)
    remark = f"{len(done)} of {len(planned)} runs, {sum(run.rounds for run in done)} rounds in all"
    remark += f"; {failed} of them failed." if failed else "."
    page = html_report.page(html_report.title_of(name, done), done, remark, _command())
    (folder / "report.html").write_text(page, encoding="utf-8")
    png_charts.draw(done, folder, name)


def _command() -> str:
    """Return the command line of this process, as one would type it."""
    return shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])


def check_plots() -> None:
    """Raise UsageError if the libraries for charts are not installed."""
    require("the HTML report", "matplotlib", "plotly", otherwise="use --no-pictures")
