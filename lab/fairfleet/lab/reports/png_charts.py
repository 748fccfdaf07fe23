"""The charts of a comparison as PNG files, for papers and pages without interactive charts."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, count
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")  # Draws into files only and needs no screen.

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from fairfleet.lab.experiments.run_log import Run
from fairfleet.lab.reports import chart_data
from fairfleet.lab.reports.result_rows import runs_with_result

CURVES = {
    "mean": "average accuracy (%)",
    "worst_5": "accuracy of the worst 5 % (%)",
    "conflicts": "conflicts (%)",
}
KINDS = (*CURVES, "clients", "pareto")


def draw(
    runs: Sequence[Run], folder: Path, name: str, kinds: Collection[str] = KINDS
) -> list[Path]:
    """Draw these kinds of charts for every setting and return the paths of the files.

    A setting in which all runs failed has no charts.
    """
    written: list[Path] = []
    for setting in chart_data.settings(runs):
        setting_runs = [run for run in runs if run.setting == setting and run.points]
        if not runs_with_result(setting_runs):
            continue
        stem = "-".join(part for part in (name, _file_name(setting)) if part)
        for kind in kinds:
            path = _unused(folder / f"{stem}-{kind.replace('_', '-')}.png", written)
            written.append(path)
            with _axes(path, setting) as axes:
                _draw_kind(axes, setting_runs, kind)
    return written


def _draw_kind(axes: Axes, runs: Sequence[Run], kind: str) -> None:
    if kind in CURVES:
        curve(axes, runs, kind, CURVES[kind])
    elif kind == "clients":
        distributions(axes, runs)
    else:
        pareto(axes, runs)


def curve(axes: Axes, runs: Sequence[Run], field: str, title: str) -> None:
    """Draw one field of the points over the rounds, in percent, with bands over the seeds."""
    labels = chart_data.labels(runs)
    for line in chart_data.lines(runs, field, 100.0):
        colour = chart_data.colour(line.label, labels)
        axes.plot(line.rounds, line.middle, color=colour, label=_legend(line.label), linewidth=1.4)
        axes.fill_between(line.rounds, line.low, line.high, color=colour, alpha=0.15, linewidth=0)
    axes.set_xlabel("round")
    is_accuracy = field in chart_data.ACCURACIES
    axes.set_ylabel(chart_data.accuracy_title(title, runs) if is_accuracy else title)
    axes.legend(fontsize=8)


def distributions(axes: Axes, runs: Sequence[Run]) -> None:
    """Draw the final accuracies of all clients, one box per rule with a result."""
    labels, accuracies = chart_data.labels(runs), chart_data.accuracies(runs)
    boxes = axes.boxplot(list(accuracies.values()), patch_artist=True)
    for box, label in zip(boxes["boxes"], accuracies, strict=True):
        box.set_facecolor(chart_data.colour(label, labels))
        box.set_alpha(0.4)
    ticks = range(1, len(accuracies) + 1)
    axes.set_xticks(ticks, list(accuracies), rotation=30, horizontalalignment="right", fontsize=8)
    axes.set_ylabel(chart_data.accuracy_title("client accuracy (%)", runs))


def pareto(axes: Axes, runs: Sequence[Run]) -> None:
    """Draw mean accuracy against the accuracy of the worst 5 %, with the Pareto front."""
    labels, dots = chart_data.labels(runs), chart_data.dots(runs)
    front = chart_data.pareto_front(dots)
    averages, worst = [dot.average for dot in front], [dot.worst for dot in front]
    axes.plot(averages, worst, ":", color="#bbbbbb", zorder=0)
    for dot in dots:
        axes.errorbar(
            dot.average,
            dot.worst,
            dot.worst_spread,
            dot.average_spread,
            fmt="o",
            color=chart_data.colour(dot.label, labels),
            label=_legend(dot.label),
        )
    # The legend stands outside, because labels next to crowded dots cannot be read.
    axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.01, 1.0))
    axes.set_xlabel(chart_data.accuracy_title("average accuracy (%)", runs))
    axes.set_ylabel(chart_data.accuracy_title("worst 5 % (%)", runs))


@contextmanager
def _axes(path: Path, title: str) -> Iterator[Axes]:
    """Yield empty axes and save them to the path afterwards."""
    # Names come from users and may contain a dollar sign, which must not start a formula.
    with mpl.rc_context({"text.parse_math": False}):
        figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
        yield axes
        axes.set_title(title, fontsize=10)
        axes.grid(alpha=0.25)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=130)
        plt.close(figure)


def _legend(label: str) -> str:
    """Return a label that matplotlib shows; it hides labels that begin with an underscore."""
    return f" {label}" if label.startswith("_") else label


def _unused(path: Path, written: Collection[Path]) -> Path:
    """Return the path, with a number if another setting already has the same file name."""
    numbered = (path.with_stem(f"{path.stem}-{number}") for number in count(2))
    return next(candidate for candidate in chain([path], numbered) if candidate not in written)


def _file_name(text: str) -> str:
    return "".join(c if c.isalnum() else "-" for c in text.lower()).strip("-")
