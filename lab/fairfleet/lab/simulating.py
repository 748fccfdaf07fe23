"""`fairfleet simulate`: one experiment, watched round by round."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table

from fairfleet.common.event_files import EventFiles
from fairfleet.common.settings import read_model
from fairfleet.lab import options, tables
from fairfleet.lab.experiment import Experiment
from fairfleet.lab.records import InMemory, Ledger, Run
from fairfleet.lab.sweep import Means, Planned, finished, run_sweep

SHOWN = 10  # points of the learning curve


def simulate(
    config: Path | None,
    flags: dict[str, Any],
    record: Path | None,
    data_dir: Path | None,
    workers: int,
    as_json: bool,
    tensorboard: Path | None = None,
) -> None:
    options.end_on_signals()
    experiment = read_model(Experiment, config, flags)
    console = options.console(as_json)
    files = EventFiles(tensorboard) if tensorboard else None
    planned, ledger = [Planned(experiment.rule, "", experiment)], Ledger(record) if record else InMemory()
    try:
        run_sweep(planned, ledger, Means(data_dir, workers), None if as_json else console)
    finally:  # also on Ctrl-C: what is there is shown
        for found in finished(planned, ledger):
            if files:
                write_events(found, files)
            if as_json:
                print(json.dumps(told(found)))
            else:
                show(found, console, record)


def write_events(found: Run, files: EventFiles) -> None:
    """The learning curve, under the names that a server's event files have."""
    for point in found.points:
        curve = {
            "accuracy/mean": point.mean,
            "accuracy/standard_deviation": point.deviation,
            "accuracy/worst_5": point.worst_5,
            "accuracy/best_5": point.best_5,
            "accuracy/worst_10": point.worst_10,
            "accuracy/best_10": point.best_10,
            "training/loss_mean": point.loss,
            "evaluation/improved_clients": point.improved,
            "step/conflicting_clients_share": point.conflicts,
        }
        files.scalars(point.round, curve)
    if found.honest:
        files.distribution(found.rounds, "accuracy/clients", found.honest)
    files.close()


def told(found: Run) -> dict[str, Any]:
    fairness = asdict(found.fairness) if found.honest else None
    return {**json.loads(found.model_dump_json()), "fairness": fairness}


def show(found: Run, console: Console, record: Path | None = None) -> None:
    if found.failure:
        console.print(f"[bold red]failed[/] after {found.rounds} rounds: {escape(found.failure)}")
        return
    if found.points:
        console.print(Padding(curve(found), (1, 0)))
    if not found.complete:
        kept = f"kept in {record}; the same command runs it to its end" if record else "--record FILE would keep it"
        console.print(f"[bold]stopped[/] after {found.rounds} of {found.experiment.rounds} rounds; {escape(kept)}")
        return
    console.print(tables.table(tables.rows([found]), console.width))
    rate = found.rounds / found.seconds if found.seconds else 0.0
    console.print(f"{found.rounds} rounds in {found.seconds:.1f} s, {rate:.1f} a second", style="dim")


def curve(found: Run) -> Table:
    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0))
    for heading in ("round", "average", "σ", "worst 5 %", "best 5 %", "training loss", "conflicts"):
        table.add_column(heading, justify="right")
    step = max(1, len(found.points) // SHOWN)
    for point in found.points[::-1][::step][::-1]:
        values = (point.mean, point.deviation, point.worst_5, point.best_5)
        loss = "-" if point.loss is None else f"{point.loss:.4f}"
        conflicts = "-" if point.conflicts is None else f"{100 * point.conflicts:.1f} %"
        table.add_row(str(point.round), *(f"{100 * value:.2f}" for value in values), loss, conflicts)
    return table
