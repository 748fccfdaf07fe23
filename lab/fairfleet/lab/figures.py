"""What a comparison looks like: the data of each picture, worked out once for the report and the PNGs alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fairfleet.lab import tables
from fairfleet.lab.records import Point, Run

ACCURACIES = {"mean", "worst_5"}  # fields of a point that are over honest clients; the others are over all

COLOURS = (
    "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f7f7f", "#8c564b", "#17becf", "#bcbd22",
    "#000000", "#9467bd",
)  # fmt: skip


@dataclass(frozen=True)
class Line:
    """One rule over the rounds: the mean over the seeds, and how far single seeds go."""

    label: str
    rounds: list[int]
    middle: list[float]
    low: list[float]
    high: list[float]


@dataclass(frozen=True)
class Dot:
    """One rule as a point: what the average client gets, and what the worst 5 % get; spreads are over the seeds."""

    label: str
    average: float
    worst: float
    average_spread: float
    worst_spread: float


def settings(runs: Sequence[Run]) -> list[str]:
    return list(dict.fromkeys(run.setting for run in runs))


def labels(runs: Sequence[Run]) -> list[str]:
    return list(dict.fromkeys(run.label for run in runs))


def colour(label: str, known: Sequence[str]) -> str:
    return COLOURS[list(known).index(label) % len(COLOURS)]


def of_honest(words: str, runs: Sequence[Run]) -> str:
    """Words for accuracies. Attackers' do not count: an attacked run is drawn over fewer clients than one in peace."""
    return f"{words}, honest clients only" if any(run.dishonest for run in runs) else words


def lines(runs: Sequence[Run], field: str, scale: float = 1.0) -> list[Line]:
    """A field of the evaluated points, for every rule."""
    found = []
    for label in labels(runs):
        curves = [_curve(run.points, field, scale) for run in runs if run.label == label and run.points]
        common = sorted(set.intersection(*(set(curve) for curve in curves))) if curves else []
        if not common:
            continue
        values = np.array([[curve[round] for round in common] for curve in curves])
        low, middle, high = values.min(0), values.mean(0), values.max(0)
        found.append(Line(label, common, middle.tolist(), low.tolist(), high.tolist()))
    return found


def _curve(points: Sequence[Point], field: str, scale: float) -> dict[int, float]:
    return {point.round: scale * value for point in points if (value := getattr(point, field)) is not None}


def accuracies(runs: Sequence[Run]) -> dict[str, list[float]]:
    """By rule, where it has a result: of all clients in all seeds, in percent."""
    found: dict[str, list[float]] = {}
    for run in tables.with_result(runs):
        found.setdefault(run.label, []).extend(100 * value for value in run.honest)
    return found


def dots(runs: Sequence[Run]) -> list[Dot]:
    """The figures of the tables, of rules that have a result."""
    counted, found = tables.with_result(runs), []
    for label in labels(counted):
        served = [run.fairness for run in counted if run.label == label]
        average, worst = (tables.spread([100 * getattr(one, name) for one in served]) for name in ("mean", "worst_5"))
        found.append(Dot(label, average.mean, worst.mean, average.deviation, worst.deviation))
    return found


def pareto(found: Sequence[Dot]) -> list[Dot]:
    """Those that no other beats in both, from the fairest to the most accurate."""
    best = [dot for dot in found if not any(_beats(other, dot) for other in found)]
    return sorted(best, key=lambda dot: dot.average)


def _beats(other: Dot, dot: Dot) -> bool:
    """Nowhere below, and somewhere above: of two that are equal, neither."""
    mine, theirs = (dot.average, dot.worst), (other.average, other.worst)
    return all(their >= my for my, their in zip(mine, theirs, strict=True)) and theirs != mine
