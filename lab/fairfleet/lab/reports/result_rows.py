"""The rows of a comparison: one per setting and rule, with all measures over the seeds.

Failed runs never enter a mean. A row says how many of its runs failed and why.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fairfleet.lab.experiments.run_log import Run
from fairfleet.lab.reports.measures import (
    MEASURES,
    OPTIONAL_MEASURES,
    SeedSpread,
    TableMeasure,
    spread,
)


@dataclass(frozen=True)
class ResultRow:
    """One rule in one setting."""

    setting: str
    label: str
    seeds: tuple[int, ...]  # of the runs with a result
    measures: dict[str, SeedSpread]  # by the name of the measure
    seconds: float  # mean duration of a run
    sign: int = 1  # -1: lower values of the runs' measure are better
    failures: tuple[str, ...] = ()  # one message for each failed run

    @property
    def seeds_text(self) -> str:
        """Return the number of seeds with a result, and of how many, if some runs failed.

        A mean over the remaining seeds says little about a rule whose other seeds diverged.
        """
        if not self.failures:
            return str(len(self.seeds))
        total = len(self.seeds) + len(self.failures)
        return f"{len(self.seeds)} of {total}" if self.seeds else "failed"


def result_rows(runs: Sequence[Run]) -> list[ResultRow]:
    """Return rows in the order in which settings and rules appear; only complete runs count."""
    groups: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        if run.complete:
            groups.setdefault((run.setting, run.label), []).append(run)
    measures = (*MEASURES, *_available_optional_measures(runs))
    return [_row(setting, label, group, measures) for (setting, label), group in groups.items()]


def _available_optional_measures(runs: Sequence[Run]) -> list[TableMeasure]:
    counted = [(run, run.fairness) for run in runs_with_result(runs)]
    return [
        measure
        for measure in OPTIONAL_MEASURES
        if any(math.isfinite(measure.of(run, fairness)) for run, fairness in counted)
    ]


def _row(
    setting: str, label: str, runs: Sequence[Run], measures: Sequence[TableMeasure]
) -> ResultRow:
    counted = [(run, run.fairness) for run in runs_with_result(runs)]
    return ResultRow(
        setting,
        label,
        tuple(run.experiment.seed for run, _ in counted),
        {
            measure.name: spread([measure.of(run, fairness) for run, fairness in counted])
            for measure in measures
        },
        float(np.mean([run.seconds for run in runs])),
        runs[0].sign,
        tuple(run.failure for run in runs if run.failure),
    )


def runs_with_result(runs: Sequence[Run]) -> list[Run]:
    """Return the runs that did not fail and whose honest clients have test samples."""
    return [run for run in runs if not run.failure and run.honest]


def failed_runs(runs: Sequence[Run]) -> list[str]:
    """Return one line of text per failed run: which run it was and why it failed."""
    return [f"{_run_name(run)}: {run.failure}" for run in runs if run.failure]


def _run_name(run: Run) -> str:
    names = " ".join(name for name in (run.setting, run.label) if name)
    return f"{names}, seed {run.experiment.seed}"


def measures_shown(rows: Sequence[ResultRow]) -> list[TableMeasure]:
    """Return the measures that these rows have, in the order of their columns."""
    return [
        measure
        for measure in (*MEASURES, *OPTIONAL_MEASURES)
        if any(measure.name in row.measures for row in rows)
    ]
