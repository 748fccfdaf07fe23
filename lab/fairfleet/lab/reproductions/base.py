"""A reproduction: a sweep, the published figures, and claims that the measured figures test.

It computes on recorded runs only and runs nothing itself. The verdicts are sentences for the
terminal and for the page of results.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import NamedTuple

from fairfleet.lab.experiments.run_log import Run
from fairfleet.lab.experiments.sweep import Sweep
from fairfleet.lab.experiments.sweep_runner import EARLIER_READING
from fairfleet.lab.reports.measures import SeedSpread, spread


class Column(NamedTuple):
    """A figure of the published table, and how it is computed from a run."""

    name: str
    of: Callable[[Run], float]
    digits: int = 2
    tolerance: float | None = 2.0  # Largest agreeing difference; None: not judged.


Published = Mapping[str, Mapping[str, float]]  # "setting / rule" or "rule" -> column -> figure


class TableLine(NamedTuple):
    """One row of the table, measured and published."""

    setting: str
    label: str
    seeds: int
    measured: dict[str, SeedSpread]
    published: Mapping[str, float]
    seconds: float
    by_seed: Mapping[int, Mapping[str, float]]  # The figures of each run.
    digits: Mapping[str, int]  # By column.

    @property
    def name(self) -> str:
        """The key of the line in `published`: "setting / rule", or only the rule."""
        return f"{self.setting} / {self.label}" if self.setting else self.label

    def value(self, column: str) -> float:
        """Return the measured figure, as the mean over the seeds."""
        return self.measured[column].mean


Lines = Mapping[str, TableLine]  # By name.
Claim = Callable[[Lines], "ClaimVerdict | None"]  # None: its runs are missing.


class ClaimVerdict(NamedTuple):
    """Whether a claim holds, and the sentence that says so."""

    holds: bool
    words: str


@dataclass(frozen=True)
class Reproduction:
    """A published table, the sweep that reproduces it, and the claims that are tested."""

    name: str
    title: str
    about: str  # What is run, and where it may differ from the authors' runs.
    sweep: Sweep
    quick: Sweep
    columns: tuple[Column, ...]
    published: Published
    claims: tuple[Claim, ...] = ()
    notes: tuple[str, ...] = field(default=())  # Explanations of the differences.
    # Rules of the table that would overcrowd the pictures.
    not_drawn: frozenset[str] = frozenset()

    def lines(self, runs: Sequence[Run]) -> list[TableLine]:
        """Return one line for each setting and rule, over all complete runs without a failure."""
        grouped: dict[tuple[str, str], list[Run]] = {}
        for run in runs:
            if run.complete and not run.failure:
                grouped.setdefault((run.setting, run.label), []).append(run)
        return [self._line(setting, label, group) for (setting, label), group in grouped.items()]

    def _line(self, setting: str, label: str, runs: Sequence[Run]) -> TableLine:
        by_seed = {
            run.experiment.seed: {column.name: column.of(run) for column in self.columns}
            for run in runs
        }
        return TableLine(
            setting,
            label,
            len(runs),
            {
                column.name: spread([figures[column.name] for figures in by_seed.values()])
                for column in self.columns
            },
            self.published_line(setting, label),
            sum(run.seconds for run in runs) / len(runs),
            by_seed,
            {column.name: column.digits for column in self.columns},
        )

    def published_line(self, setting: str, label: str) -> Mapping[str, float]:
        """Return the published figures to compare with, or nothing if there are none.

        Another reading of a rule's setup ("FedAvg, one batch") is compared with the rule's line.
        """
        present_reading = label.partition(EARLIER_READING)[0]
        for rule in (label, present_reading, label.partition(",")[0]):
            if figures := self.published.get(f"{setting} / {rule}" if setting else rule):
                return figures
        return {}

    def verdicts(self, lines: Sequence[TableLine], *, quick: bool = False) -> list[ClaimVerdict]:
        """Return the verdicts on the claims, then on the figures of each line.

        A quick run is too short to compare figures.
        """
        by_name = {line.name: line for line in lines}
        on_claims = [verdict for claim in self.claims if (verdict := claim(by_name)) is not None]
        on_figures = [verdict for line in lines if (verdict := self._compare(line)) is not None]
        return on_claims if quick else on_claims + on_figures

    def _compare(self, line: TableLine) -> ClaimVerdict | None:
        judged = [c for c in self.columns if c.tolerance is not None and c.name in line.published]
        if not judged:
            return None
        off = {c.name: line.value(c.name) - line.published[c.name] for c in judged}
        far = [c.name for c in judged if not abs(off[c.name]) <= (c.tolerance or math.inf)]
        if not far:
            near = f"{_listed([c.name for c in judged])} within {_tolerances(judged)}"
            return ClaimVerdict(True, f"{line.name}: {near} of the published figures")
        words = _listed([_off_by(off[c.name], c) for c in judged if c.name in far])
        return ClaimVerdict(False, f"{line.name}: off by more than {_tolerances(judged)}: {words}")


def _off_by(difference: float, column: Column) -> str:
    """Return the difference with the table's digits, or one more if it looks like the tolerance.

    0.0204 is more than 0.02, but would be shown as 0.020.
    """
    unclear = round(abs(difference), column.digits) <= (column.tolerance or 0.0)
    return f"{column.name} {difference:+.{column.digits + unclear}f}"


def _tolerances(columns: Sequence[Column]) -> str:
    values = sorted({column.tolerance for column in columns if column.tolerance is not None})
    return " or ".join(f"{value:g}" for value in values)


def _listed(names: Sequence[str]) -> str:
    return (
        " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names) or "nothing"
    )


def above(better: str, worse: str, *columns: str, setting: str = "") -> Claim:
    """Return the claim that one rule is above another in these columns.

    The claim compares the seeds that both rules were run with.
    """
    first, second = (f"{setting} / {label}" if setting else label for label in (better, worse))

    def _claim(lines: Lines) -> ClaimVerdict | None:
        if first not in lines or second not in lines:
            return None
        a, b = lines[first], lines[second]
        seeds = a.by_seed.keys() & b.by_seed.keys()
        if not seeds:
            return None
        gains = {
            column: [a.by_seed[seed][column] - b.by_seed[seed][column] for seed in sorted(seeds)]
            for column in columns
        }
        words = ", ".join(
            _gained(column, by_seed, a.digits[column]) for column, by_seed in gains.items()
        )
        over = f"{len(seeds)} seed{'s' if len(seeds) > 1 else ''}"
        return ClaimVerdict(
            min(map(fmean, gains.values())) > 0, f"{first} above {second}: {words} ({over})"
        )

    return _claim


def _gained(column: str, by_seed: Sequence[float], digits: int) -> str:
    """Return the mean gain and, if the seeds disagree on its sign, the gain of each seed."""
    words = f"{column} {fmean(by_seed):+.{digits}f}"
    agreed = min(by_seed) > 0 or max(by_seed) <= 0
    return (
        words
        if agreed
        else f"{words}, by seed {' '.join(f'{gain:+.{digits}f}' for gain in by_seed)}"
    )


def percent(name: str) -> Callable[[Run], float]:
    """Return a function that computes a measure of `Fairness` over the clients, in percent."""
    return lambda run: 100 * float(getattr(run.fairness, name))


def client_accuracy(number: int) -> Callable[[Run], float]:
    """Return a function that computes the accuracy of one client, in percent."""
    return lambda run: 100 * (run.accuracy[number] or 0.0)


def pooled_accuracy(run: Run) -> float:
    """Return the accuracy over the test samples of all clients together, in percent."""
    accuracies = [
        (value, count)
        for value, count in zip(run.accuracy, run.tested, strict=True)
        if value is not None
    ]
    correct = sum(value * count for value, count in accuracies)
    return 100 * correct / sum(count for _, count in accuracies)
