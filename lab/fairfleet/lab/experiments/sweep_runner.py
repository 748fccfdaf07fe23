"""Run the experiments of a sweep, with progress bars, and collect their records.

A run that the log already has is not run again, so an interrupted sweep continues where it
stopped.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from fairfleet.lab.experiments.run_log import Ledger, Run
from fairfleet.lab.experiments.runner import RunLabels, run
from fairfleet.lab.experiments.sweep import PlannedRun

EARLIER_READING = ", earlier reading: "  # between the label of a run and its reading


@dataclass(frozen=True)
class RunResources:
    """What a run uses: the folder of the datasets and the number of threads."""

    data_dir: Path | None = None
    workers: int = 0  # 0: all cores


def run_sweep(
    planned: list[PlannedRun], ledger: Ledger, resources: RunResources, console: Console | None
) -> list[Run]:
    """Run what the log does not have, and return all runs in the order of the sweep.

    The console shows the progress; None shows nothing. Raise UsageError before the first run if
    the log cannot be written.
    """
    records = {key: record for key, record in ledger.runs().items() if record.complete}
    keys = [plan.experiment.key() for plan in planned]
    missing = {key: plan for key, plan in zip(keys, planned, strict=True) if key not in records}
    if missing:
        ledger.prepare()
    rounds = sum(plan.experiment.rounds for plan in missing.values())
    with _progress_bars(console) as bars:
        title = f"{len(missing)} of {len(planned)} runs"
        total = bars.add_task(title, total=max(rounds, 1), visible=len(missing) > 1)
        rounds_before = 0
        for key, plan in missing.items():
            records[key] = _run_planned(plan, ledger, resources, bars, total, rounds_before)
            rounds_before += plan.experiment.rounds
    return [relabelled(records[key], plan) for key, plan in zip(keys, planned, strict=True)]


def recorded_runs(planned: list[PlannedRun], ledger: Ledger) -> list[Run]:
    """Return those runs of the sweep that the log has, complete or not; run nothing."""
    records = ledger.runs()
    return [
        relabelled(records[key], plan)
        for plan in planned
        if (key := plan.experiment.key()) in records
    ]


def earlier_runs(planned: list[PlannedRun], ledger: Ledger) -> list[Run]:
    """Return recorded runs from before a revision of their rule, dataset or measures.

    They are labelled with the reading of that time. Those that the sweep still has under another
    name are left out.
    """
    present = {plan.experiment.key() for plan in planned}
    records = {key: run for key, run in ledger.runs().items() if key not in present}
    return [
        relabelled(records[key], plan._replace(label=f"{plan.label}{EARLIER_READING}{words}"))
        for plan in planned
        for words, key in plan.experiment.earlier_keys().items()
        if key in records
    ]


def relabelled(record: Run, planned: PlannedRun) -> Run:
    """Return the record with the names of this sweep; another sweep may have recorded it."""
    return record.model_copy(update={"label": planned.label, "setting": planned.setting})


def _run_planned(
    planned: PlannedRun,
    ledger: Ledger,
    resources: RunResources,
    bars: Progress,
    total: TaskID,
    rounds_before: int,
) -> Run:
    experiment = planned.experiment
    title = (planned.setting, planned.label, f"seed {experiment.seed}")
    bar = bars.add_task(" ".join(part for part in title if part), total=experiment.rounds)

    def _show_progress(rounds_done: int, _rounds: int) -> None:
        # Absolute counts, because a run may start in its middle, from a checkpoint.
        bars.update(bar, completed=rounds_done)
        bars.update(total, completed=rounds_before + rounds_done)

    record = run(
        experiment,
        labels=RunLabels(planned.label, planned.setting),
        data_dir=resources.data_dir,
        workers=resources.workers,
        progress=_show_progress,
        keep=ledger.add,
        checkpoint=ledger.checkpoint(experiment),
    )
    bars.remove_task(bar)
    return record


def _progress_bars(console: Console | None) -> Progress:
    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
        disable=console is None,
        transient=True,
    )
