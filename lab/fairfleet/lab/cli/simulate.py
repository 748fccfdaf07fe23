"""`fairfleet simulate`: run one experiment and show its learning curve.

A run that is interrupted is shown as far as it got.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table

from fairfleet.common.cli.durations import format_duration
from fairfleet.common.cli.settings import read_model
from fairfleet.common.tensorboard import EventFiles
from fairfleet.lab.cli import options
from fairfleet.lab.experiments.experiment import Experiment
from fairfleet.lab.experiments.run_log import Ledger, MemoryLedger, Run
from fairfleet.lab.experiments.sweep import PlannedRun
from fairfleet.lab.experiments.sweep_runner import RunResources, recorded_runs, run_sweep
from fairfleet.lab.reports import tables
from fairfleet.lab.reports.result_rows import result_rows

CURVE_POINTS = 10  # shown of the learning curve
CURVE_HEADINGS = (
    "round",
    "average",
    "σ",
    "worst 5 %",
    "best 5 %",
    "training loss",
    "conflicts",
)


def simulate(
    config: Path | None,
    flags: dict[str, Any],
    log: Path | None,
    data_dir: Path | None,
    workers: int,
    as_json: bool,
    tensorboard: Path | None = None,
) -> None:
    """Run the experiment of a YAML file and flags, and print its result.

    `log` is the file that records the run; None records nothing.
    """
    options.end_on_signals()
    experiment = read_model(Experiment, config, flags)
    console = options.console(as_json)
    files = EventFiles(tensorboard) if tensorboard else None
    planned = [PlannedRun(experiment.rule, "", experiment)]
    ledger = Ledger(log) if log else MemoryLedger()
    try:
        run_sweep(planned, ledger, RunResources(data_dir, workers), None if as_json else console)
    finally:  # Also on Ctrl-C, so that the rounds so far are shown.
        for run in recorded_runs(planned, ledger):
            if files:
                write_events(run, files)
            if as_json:
                print(json.dumps(run_json(run)))
            else:
                show(run, console, log)


def write_events(run: Run, files: EventFiles) -> None:
    """Write the learning curve under the names that a server uses in its event files."""
    for point in run.points:
        scalars = {
            f"{run.measure}/mean": point.mean,
            f"{run.measure}/standard_deviation": point.deviation,
            f"{run.measure}/worst_5": point.worst_5,
            f"{run.measure}/best_5": point.best_5,
            f"{run.measure}/worst_10": point.worst_10,
            f"{run.measure}/best_10": point.best_10,
            "training/loss_mean": point.loss,
            "evaluation/improved_clients": point.improved,
            "evaluation/strictly_improved_clients": point.fallen,
            "step/conflicting_clients_share": point.conflicts,
        }
        files.scalars(point.round, scalars)
    if run.honest:
        files.distribution(run.rounds, f"{run.measure}/clients", run.honest)
    files.close()


def run_json(run: Run) -> dict[str, Any]:
    """Return the record of a run with its fairness measures, for `--json`."""
    fairness = asdict(run.fairness) if run.honest else None
    return {**json.loads(run.model_dump_json()), "fairness": fairness}


def show(run: Run, console: Console, log: Path | None = None) -> None:
    """Print the learning curve of a run and, if it is complete, its table."""
    if run.failure:
        console.print(f"[bold red]failed[/] after {run.rounds} rounds: {escape(run.failure)}")
        return
    if run.points:
        console.print(Padding(curve(run), (1, 0)))
    if not run.complete:
        hint = (
            f"recorded in {log}; the same command continues it"
            if log
            else "use --record FILE to be able to continue"
        )
        rounds = f"{run.rounds} of {run.experiment.rounds} rounds"
        console.print(f"[bold]stopped[/] after {rounds}; {escape(hint)}")
        return
    console.print(tables.table(result_rows([run]), console.width))
    rate = run.rounds / run.seconds if run.seconds else 0.0
    duration = f"{run.rounds} rounds in {format_duration(run.seconds)}, {rate:.1f} per second"
    console.print(duration, style="dim")


def curve(run: Run) -> Table:
    """Return about ten points of the learning curve, the last one included, as a table."""
    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0))
    for heading in CURVE_HEADINGS:
        table.add_column(heading, justify="right")
    step = max(1, len(run.points) // CURVE_POINTS)
    for point in run.points[::-1][::step][::-1]:
        accuracies = (point.mean, point.deviation, point.worst_5, point.best_5)
        loss = "-" if point.loss is None else f"{point.loss:.4f}"
        conflicts = "-" if point.conflicts is None else f"{100 * point.conflicts:.1f} %"
        digits = 2 if run.measure == "accuracy" else 4
        cells = [f"{run.scale * value:.{digits}f}" for value in accuracies]
        table.add_row(str(point.round), *cells, loss, conflicts)
    return table
