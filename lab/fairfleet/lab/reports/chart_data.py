"""The data of each chart of a comparison, computed once for the HTML report and the PNG files.

Charts of results leave out runs that failed. Accuracies cover honest clients only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fairfleet.lab.experiments.run_log import Point, Run
from fairfleet.lab.reports.measures import spread
from fairfleet.lab.reports.result_rows import runs_with_result

# Fields of a point that cover honest clients only; the others cover all clients.
ACCURACIES = {"mean", "worst_5"}

COLOURS = (
    "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9",
    "#7f7f7f", "#8c564b", "#17becf", "#bcbd22", "#000000", "#9467bd",
)  # fmt: skip


@dataclass(frozen=True)
class ChartLine:
    """One rule over the rounds: the mean over the seeds, and the lowest and highest seed."""

    label: str
    rounds: list[int]
    middle: list[float]
    low: list[float]
    high: list[float]


@dataclass(frozen=True)
class Dot:
    """One rule as a point: mean accuracy and accuracy of the worst 5 %, with spreads over seeds."""

    label: str
    average: float
    worst: float
    average_spread: float
    worst_spread: float
    sign: int = 1  # -1: lower values are better


def settings(runs: Sequence[Run]) -> list[str]:
    """Return the settings in the order in which they appear."""
    return list(dict.fromkeys(run.setting for run in runs))


def labels(runs: Sequence[Run]) -> list[str]:
    """Return the labels of the rules in the order in which they appear."""
    return list(dict.fromkeys(run.label for run in runs))


def colour(label: str, all_labels: Sequence[str]) -> str:
    """Return the colour of a rule, which depends on its position among all rules."""
    return COLOURS[list(all_labels).index(label) % len(COLOURS)]


def accuracy_title(title: str, runs: Sequence[Run]) -> str:
    """Return a title for accuracies, or another measure, that says so if attackers are left out.

    The accuracy of an attacker does not count, so an attacked run covers fewer clients.
    """
    if runs and runs[0].measure != "accuracy":
        title = title.replace(" (%)", "").replace("ccuracy", runs[0].measure)
        title = title.replace(f"A{runs[0].measure}", runs[0].measure)
        title = title.replace(f"a{runs[0].measure}", runs[0].measure)
    return f"{title}, honest clients only" if any(run.dishonest for run in runs) else title


def lines(runs: Sequence[Run], field: str, scale: float = 1.0) -> list[ChartLine]:
    """Return a field of the points for every rule, over the rounds that all its seeds have."""
    chart_lines = []
    if field in ACCURACIES and runs:
        scale = runs[0].scale
    for label in labels(runs):
        curves = [
            _curve(run.points, field, scale) for run in runs if run.label == label and run.points
        ]
        common = sorted(set.intersection(*(set(curve) for curve in curves))) if curves else []
        if not common:
            continue
        values = np.array([[curve[round_number] for round_number in common] for curve in curves])
        low, middle, high = values.min(0), values.mean(0), values.max(0)
        chart_lines.append(ChartLine(label, common, middle.tolist(), low.tolist(), high.tolist()))
    return chart_lines


def _curve(points: Sequence[Point], field: str, scale: float) -> dict[int, float]:
    return {
        point.round: scale * value
        for point in points
        if (value := getattr(point, field)) is not None
    }


def accuracies(runs: Sequence[Run]) -> dict[str, list[float]]:
    """Return for each rule with a result the accuracies of all clients and seeds, as shown."""
    by_label: dict[str, list[float]] = {}
    for run in runs_with_result(runs):
        by_label.setdefault(run.label, []).extend(run.scale * value for value in run.honest)
    return by_label


def dots(runs: Sequence[Run]) -> list[Dot]:
    """Return one dot for each rule with a result; the figures are those of the tables."""
    counted = runs_with_result(runs)
    return [
        _dot(label, [run for run in counted if run.label == label]) for label in labels(counted)
    ]


def _dot(label: str, runs: Sequence[Run]) -> Dot:
    fairness = [run.fairness for run in runs]
    scale = runs[0].scale
    average = spread([scale * measures.mean for measures in fairness])
    worst = spread([scale * measures.worst_5 for measures in fairness])
    return Dot(label, average.mean, worst.mean, average.deviation, worst.deviation, runs[0].sign)


def pareto_front(dots: Sequence[Dot]) -> list[Dot]:
    """Return the dots that no other beats in both figures, from fairest to most accurate."""
    best = [dot for dot in dots if not any(_beats(rival, dot) for rival in dots)]
    return sorted(best, key=lambda dot: dot.average)


def _beats(rival: Dot, dot: Dot) -> bool:
    """Return whether the rival is nowhere below and somewhere above; equal dots beat neither."""
    return (
        dot.sign * rival.average >= dot.sign * dot.average
        and dot.sign * rival.worst >= dot.sign * dot.worst
        and (rival.average, rival.worst) != (dot.average, dot.worst)
    )
