"""The measures of a comparison, and their mean and standard deviation over the seeds.

Accuracies are in percent, other measures in their own unit; all cover honest clients only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from fairfleet.common.fairness import Fairness
from fairfleet.lab.experiments.run_log import Run


class TableMeasure(NamedTuple):
    """One column of a table: what to compute from a run, and how to show it."""

    name: str  # in JSON and CSV
    heading: str
    of: Callable[[Run, Fairness], float]
    digits: int = 2
    better: int = 1  # 1: more is better; -1: less is better
    is_judged: bool = False  # `better` is meant for a measure of which higher values are better


MEASURES = (
    TableMeasure("average", "average", lambda run, f: run.scale * f.mean, is_judged=True),
    TableMeasure("deviation", "σ", lambda run, f: run.scale * f.standard_deviation, better=-1),
    TableMeasure("worst_5", "worst 5 %", lambda run, f: run.scale * f.worst_5, is_judged=True),
    TableMeasure("worst_10", "worst 10 %", lambda run, f: run.scale * f.worst_10, is_judged=True),
    TableMeasure("worst_30", "worst 30 %", lambda run, f: run.scale * f.worst_30, is_judged=True),
    TableMeasure("best_5", "best 5 %", lambda run, f: run.scale * f.best_5, is_judged=True),
    TableMeasure("best_10", "best 10 %", lambda run, f: run.scale * f.best_10, is_judged=True),
    TableMeasure("angle_degrees", "angle °", lambda run, f: f.angle_degrees, better=-1),
    TableMeasure("kl_to_uniform", "KL", lambda run, f: f.kl_to_uniform, 4, better=-1),
    TableMeasure("improved", "ρ", lambda run, f: run.improved),
    TableMeasure("strictly_improved", "strict ρ", lambda run, f: run.strictly_improved),
)


def _personal(name: str) -> Callable[[Run, Fairness], float]:
    """Return a measure of the personal models; it is NaN for a run without them."""
    return lambda run, f: (
        100 * float(getattr(Fairness.of(run.honest_personal), name)) if run.personal else math.nan
    )


# A table has these columns only if at least one run has a value.
OPTIONAL_MEASURES = (
    TableMeasure("personal_average", "personal", _personal("mean")),
    TableMeasure("personal_worst_5", "its worst 5 %", _personal("worst_5")),
    TableMeasure(
        "epsilon", "ε", lambda run, f: math.nan if run.epsilon is None else run.epsilon, better=-1
    ),
)


class SeedSpread(NamedTuple):
    """Mean and standard deviation of a measure over the seeds."""

    mean: float
    deviation: float  # of the sample; NaN for fewer than two seeds

    def format(self, digits: int) -> str:
        """Return `mean ± deviation` with these digits; `-` if there is no mean."""
        if not math.isfinite(self.mean):
            return "-"
        deviation = f" ± {self.deviation:.{digits}f}" if math.isfinite(self.deviation) else ""
        return f"{self.mean:.{digits}f}{deviation}"


def spread(values: Sequence[float]) -> SeedSpread:
    """Return mean and deviation of the finite values; NaN where there are too few."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return SeedSpread(math.nan, math.nan)
    deviation = float(np.std(finite, ddof=1)) if len(finite) > 1 else math.nan
    return SeedSpread(float(np.mean(finite)), deviation)
