"""What a reproduction is: a sweep, the figures that were published, and claims that are put to the test in words."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import NamedTuple

from fairfleet.lab.records import Run
from fairfleet.lab.sweep import Sweep
from fairfleet.lab.tables import Spread, spread


class Column(NamedTuple):
    """A figure of the published table, and how it is found in a run."""

    name: str
    of: Callable[[Run], float]
    digits: int = 2
    tolerance: float | None = 2.0  # so near is agreement; None: the figure is shown, not judged


Published = Mapping[str, Mapping[str, float]]  # "setting / rule" or "rule" -> column -> figure


class Line(NamedTuple):
    """One row of the table, measured and published."""

    setting: str
    label: str
    seeds: int
    measured: dict[str, Spread]
    published: Mapping[str, float]
    seconds: float
    by_seed: Mapping[int, Mapping[str, float]]  # the figures of each run
    digits: Mapping[str, int]  # by column

    @property
    def name(self) -> str:
        return f"{self.setting} / {self.label}" if self.setting else self.label

    def value(self, column: str) -> float:
        return self.measured[column].mean


Lines = Mapping[str, Line]  # by name
Claim = Callable[[Lines], "Verdict | None"]  # None: its runs are not there yet


class Verdict(NamedTuple):
    holds: bool
    words: str


@dataclass(frozen=True)
class Reproduction:
    name: str
    title: str
    about: str  # what is run, and where it may differ from the authors' runs
    sweep: Sweep
    quick: Sweep
    columns: tuple[Column, ...]
    published: Published
    claims: tuple[Claim, ...] = ()
    notes: tuple[str, ...] = field(default=())  # what was found out about differences
    not_drawn: frozenset[str] = frozenset()  # rules that are in the table and would crowd the pictures

    def lines(self, runs: Sequence[Run]) -> list[Line]:
        grouped: dict[tuple[str, str], list[Run]] = {}
        for run in runs:
            if run.complete and not run.failure:
                grouped.setdefault((run.setting, run.label), []).append(run)
        return [self._line(setting, label, found) for (setting, label), found in grouped.items()]

    def _line(self, setting: str, label: str, runs: Sequence[Run]) -> Line:
        by_seed = {run.experiment.seed: {column.name: column.of(run) for column in self.columns} for run in runs}
        return Line(
            setting,
            label,
            len(runs),
            {column.name: spread([figures[column.name] for figures in by_seed.values()]) for column in self.columns},
            self.published_line(setting, label),
            sum(run.seconds for run in runs) / len(runs),
            by_seed,
            {column.name: column.digits for column in self.columns},
        )

    def published_line(self, setting: str, label: str) -> Mapping[str, float]:
        """Another reading of a rule's setup ("FedAvg, one batch") is held against the rule's own line."""
        for one in (label, label.partition(",")[0]):
            if found := self.published.get(f"{setting} / {one}" if setting else one):
                return found
        return {}

    def verdicts(self, lines: Sequence[Line], *, quick: bool = False) -> list[Verdict]:
        """The claims; then, line by line, how near the figures are. A quick run is too short for figures."""
        by_name = {line.name: line for line in lines}
        found = [verdict for claim in self.claims if (verdict := claim(by_name)) is not None]
        figures = [verdict for line in lines if (verdict := self._nearness(line)) is not None]
        return found if quick else found + figures

    def _nearness(self, line: Line) -> Verdict | None:
        judged = [c for c in self.columns if c.tolerance is not None and c.name in line.published]
        if not judged:
            return None
        off = {c.name: line.value(c.name) - line.published[c.name] for c in judged}
        far = [c.name for c in judged if not abs(off[c.name]) <= (c.tolerance or math.inf)]
        within = f"{line.name}: {_listed([c.name for c in judged if c.name not in far])} within {_tolerances(judged)}"
        if not far:
            return Verdict(True, f"{within} of the published figures")
        words = _listed([_off_by(off[c.name], c) for c in judged if c.name in far])
        return Verdict(False, f"{line.name}: off by more than {_tolerances(judged)}: {words}")


def _off_by(difference: float, column: Column) -> str:
    """With the table's digits, or one more: 0.0204 is more than 0.02."""
    unclear = round(abs(difference), column.digits) <= (column.tolerance or 0.0)
    return f"{column.name} {difference:+.{column.digits + unclear}f}"


def _tolerances(columns: Sequence[Column]) -> str:
    found = sorted({column.tolerance for column in columns if column.tolerance is not None})
    return " or ".join(f"{value:g}" for value in found)


def _listed(names: Sequence[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names) or "nothing"


def above(better: str, worse: str, *columns: str, setting: str = "") -> Claim:
    """The claim that one rule is above another in these columns, over the seeds that both were run with."""
    first, second = (f"{setting} / {label}" if setting else label for label in (better, worse))

    def claim(lines: Lines) -> Verdict | None:
        if first not in lines or second not in lines:
            return None
        a, b = lines[first], lines[second]
        seeds = a.by_seed.keys() & b.by_seed.keys()
        if not seeds:
            return None
        gains = {
            column: [a.by_seed[seed][column] - b.by_seed[seed][column] for seed in sorted(seeds)] for column in columns
        }
        words = ", ".join(_gained(column, own, a.digits[column]) for column, own in gains.items())
        over = f"{len(seeds)} seed{'s' if len(seeds) > 1 else ''}"
        return Verdict(min(map(fmean, gains.values())) > 0, f"{first} above {second}: {words} ({over})")

    return claim


def _gained(column: str, by_seed: Sequence[float], digits: int) -> str:
    """The mean, and where the seeds do not agree on its sign, each of them."""
    words = f"{column} {fmean(by_seed):+.{digits}f}"
    agreed = min(by_seed) > 0 or max(by_seed) <= 0
    return words if agreed else f"{words}, by seed {' '.join(f'{gain:+.{digits}f}' for gain in by_seed)}"


def percent(name: str) -> Callable[[Run], float]:
    """A measure of `Fairness` over the clients, in percent."""
    return lambda run: 100 * float(getattr(run.fairness, name))


def client(number: int) -> Callable[[Run], float]:
    """The accuracy of one client, in percent."""
    return lambda run: 100 * (run.accuracy[number] or 0.0)


def pooled(run: Run) -> float:
    """Over all test samples, whoever holds them, in percent."""
    known = [(value, count) for value, count in zip(run.accuracy, run.tested, strict=True) if value is not None]
    return 100 * sum(value * count for value, count in known) / sum(count for _, count in known)
