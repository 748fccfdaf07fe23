"""The pictures of a comparison as PNG files, for papers and pages that cannot show an interactive one."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, count
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")  # no window is ever opened

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from fairfleet.lab import figures, tables
from fairfleet.lab.records import Run

CURVES = {"mean": "average accuracy (%)", "worst_5": "accuracy of the worst 5 % (%)", "conflicts": "conflicts (%)"}
KINDS = (*CURVES, "clients", "pareto")


def draw(runs: Sequence[Run], folder: Path, name: str, kinds: Collection[str] = KINDS) -> list[Path]:
    """The pictures of every setting: curves over the rounds, distributions, the Pareto plot; returns the files."""
    written: list[Path] = []
    for setting in figures.settings(runs):
        here = [run for run in runs if run.setting == setting and run.points]
        if not tables.with_result(here):
            continue  # all failed: there is nothing to compare
        stem = "-".join(part for part in (name, _file_name(setting)) if part)
        for kind in kinds:
            written.append(_unused(folder / f"{stem}-{kind.replace('_', '-')}.png", written))
            with _axes(written[-1], setting) as axes:
                if kind in CURVES:
                    curve(axes, here, kind, CURVES[kind])
                elif kind == "clients":
                    distributions(axes, here)
                else:
                    pareto(axes, here)
    return written


def curve(axes: Axes, runs: Sequence[Run], field: str, title: str) -> None:
    known = figures.labels(runs)
    for line in figures.lines(runs, field, 100.0):
        colour = figures.colour(line.label, known)
        axes.plot(line.rounds, line.middle, color=colour, label=_legend(line.label), linewidth=1.4)
        axes.fill_between(line.rounds, line.low, line.high, color=colour, alpha=0.15, linewidth=0)
    axes.set_xlabel("round")
    axes.set_ylabel(figures.of_honest(title, runs) if field in figures.ACCURACIES else title)
    axes.legend(fontsize=8)


def distributions(axes: Axes, runs: Sequence[Run]) -> None:
    known, found = figures.labels(runs), figures.accuracies(runs)
    boxes = axes.boxplot(list(found.values()), patch_artist=True)
    for box, label in zip(boxes["boxes"], found, strict=True):
        box.set_facecolor(figures.colour(label, known))
        box.set_alpha(0.4)
    axes.set_xticks(range(1, len(found) + 1), list(found), rotation=30, horizontalalignment="right", fontsize=8)
    axes.set_ylabel(figures.of_honest("client accuracy (%)", runs))


def pareto(axes: Axes, runs: Sequence[Run]) -> None:
    known, found = figures.labels(runs), figures.dots(runs)
    front = figures.pareto(found)
    axes.plot([dot.average for dot in front], [dot.worst for dot in front], ":", color="#bbbbbb", zorder=0)
    for dot in found:
        colour = figures.colour(dot.label, known)
        axes.errorbar(
            dot.average,
            dot.worst,
            dot.worst_spread,
            dot.average_spread,
            fmt="o",
            color=colour,
            label=_legend(dot.label),
        )
    axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.01, 1.0))  # labels beside crowded dots cannot be read
    axes.set_xlabel(figures.of_honest("average accuracy (%)", runs))
    axes.set_ylabel(figures.of_honest("worst 5 % (%)", runs))


@contextmanager
def _axes(path: Path, title: str) -> Iterator[Axes]:
    with mpl.rc_context({"text.parse_math": False}):  # names are people's own, and may have a $ in them
        figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
        yield axes
        axes.set_title(title, fontsize=10)
        axes.grid(alpha=0.25)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=130)
        plt.close(figure)


def _legend(label: str) -> str:
    """A label that begins with a line would be left out."""
    return f" {label}" if label.startswith("_") else label


def _unused(path: Path, written: Collection[Path]) -> Path:
    """Settings of different names may have the same letters and digits."""
    numbered = (path.with_stem(f"{path.stem}-{number}") for number in count(2))
    return next(one for one in chain([path], numbered) if one not in written)


def _file_name(text: str) -> str:
    return "".join(c if c.isalnum() else "-" for c in text.lower()).strip("-")
