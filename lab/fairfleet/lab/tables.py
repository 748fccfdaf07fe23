"""A comparison in figures: one row per setting and rule, each measure as mean and standard deviation over the seeds."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from fairfleet.common.fairness import Fairness
from fairfleet.lab.records import Run

T = TypeVar("T")


class Measure(NamedTuple):
    name: str  # for programs
    heading: str
    of: Callable[[Run, Fairness], float]
    digits: int = 2
    better: int = 1  # 1: more is better; -1: less


MEASURES = (
    Measure("average", "average", lambda run, f: 100 * f.mean),
    Measure("deviation", "σ", lambda run, f: 100 * f.standard_deviation, better=-1),
    Measure("worst_5", "worst 5 %", lambda run, f: 100 * f.worst_5),
    Measure("worst_10", "worst 10 %", lambda run, f: 100 * f.worst_10),
    Measure("worst_30", "worst 30 %", lambda run, f: 100 * f.worst_30),
    Measure("best_5", "best 5 %", lambda run, f: 100 * f.best_5),
    Measure("best_10", "best 10 %", lambda run, f: 100 * f.best_10),
    Measure("angle_degrees", "angle °", lambda run, f: f.angle_degrees, better=-1),
    Measure("kl_to_uniform", "KL", lambda run, f: f.kl_to_uniform, 4, better=-1),
    Measure("improved", "ρ", lambda run, f: run.improved),
)


def _personal(name: str) -> Callable[[Run, Fairness], float]:
    return lambda run, f: 100 * float(getattr(Fairness.of(run.honest_personal), name)) if run.personal else math.nan


SOMETIMES = (  # shown where a run has them
    Measure("personal_average", "personal", _personal("mean")),
    Measure("personal_worst_5", "its worst 5 %", _personal("worst_5")),
    Measure("epsilon", "ε", lambda run, f: math.nan if run.epsilon is None else run.epsilon, better=-1),
)


class Spread(NamedTuple):
    """Over seeds."""

    mean: float
    deviation: float  # of the sample; NaN where fewer than two seeds are known

    def words(self, digits: int) -> str:
        if not math.isfinite(self.mean):
            return "-"
        return f"{self.mean:.{digits}f}" + (f" ± {self.deviation:.{digits}f}" if math.isfinite(self.deviation) else "")


@dataclass(frozen=True)
class Row:
    setting: str
    label: str
    seeds: tuple[int, ...]
    measures: dict[str, Spread]
    seconds: float  # mean of a run
    failures: tuple[str, ...] = ()  # one for each run that failed

    @property
    def seeds_words(self) -> str:
        """A mean over those that were left tells little of a rule whose other seeds diverged."""
        if not self.failures:
            return str(len(self.seeds))
        return f"{len(self.seeds)} of {len(self.seeds) + len(self.failures)}" if self.seeds else "failed"


def spread(values: Sequence[float]) -> Spread:
    known = [value for value in values if math.isfinite(value)]
    if not known:
        return Spread(math.nan, math.nan)
    return Spread(float(np.mean(known)), float(np.std(known, ddof=1)) if len(known) > 1 else math.nan)


def rows(runs: Sequence[Run]) -> list[Row]:
    """In the order in which settings and rules first appear; only complete runs count."""
    grouped: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        if run.complete:
            grouped.setdefault((run.setting, run.label), []).append(run)
    rare = [one for one in SOMETIMES if any(math.isfinite(one.of(run, run.fairness)) for run in with_result(runs))]
    measures = (*MEASURES, *rare)
    return [_row(setting, label, found, measures) for (setting, label), found in grouped.items()]


def with_result(runs: Sequence[Run]) -> list[Run]:
    """Without those that failed, and those whose honest clients have nothing to be tested on."""
    return [run for run in runs if not run.failure and run.honest]


def failures(runs: Sequence[Run]) -> list[str]:
    """In words, which runs failed and why."""
    return [
        f"{' '.join(part for part in (run.setting, run.label) if part)}, seed {run.experiment.seed}: {run.failure}"
        for run in runs
        if run.failure
    ]


def _row(setting: str, label: str, runs: Sequence[Run], measures: Sequence[Measure]) -> Row:
    good = [(run, run.fairness) for run in with_result(runs)]
    return Row(
        setting,
        label,
        tuple(run.experiment.seed for run, _ in good),
        {measure.name: spread([measure.of(run, fairness) for run, fairness in good]) for measure in measures},
        float(np.mean([run.seconds for run in runs])),
        tuple(run.failure for run in runs if run.failure),
    )


def table(found: Sequence[Row], width: int = 200) -> Group:
    """For a terminal of this width, in as many parts as it takes; the best of each setting is bold."""
    parts: list[RenderableType] = []
    for setting in dict.fromkeys(row.setting for row in found):
        here = [row for row in found if row.setting == setting]
        parts += [Text(setting, "bold")] if setting else []
        for measures in _fitting(here, width):
            parts += [_table(here, measures), ""]
    return Group(*parts)


def shown(found: Sequence[Row]) -> list[Measure]:
    """The measures that these rows have."""
    return [measure for measure in (*MEASURES, *SOMETIMES) if any(measure.name in row.measures for row in found)]


def _fitting(found: Sequence[Row], width: int) -> Iterator[list[Measure]]:
    """The measures in groups whose columns fit beside the rules' names."""
    cells = {measure: [row.measures[measure.name].words(measure.digits) for row in found] for measure in shown(found)}
    columns = [(measure, [measure.heading, *words]) for measure, words in cells.items()]
    beside = [["rule", *(row.label for row in found)], ["seeds", *(row.seeds_words for row in found)]]
    return in_groups(columns, beside, width)


def in_groups(
    columns: Iterable[tuple[T, Sequence[str]]], beside: Iterable[Sequence[str]], width: int
) -> Iterator[list[T]]:
    """Columns in groups that fit the width, each group beside the same first ones; all with the words in them."""
    first = sum(map(_takes, beside))
    group, used = list[T](), first
    for column, words in columns:
        if group and used + _takes(words) > width:
            yield group
            group, used = [], first
        group.append(column)
        used += _takes(words)
    yield group


def _takes(words: Sequence[str]) -> int:
    """A column's width, and the space behind it."""
    return max(map(len, words)) + 2


def _table(found: Sequence[Row], measures: Sequence[Measure]) -> Table:
    out = Table(box=None, header_style="dim", padding=(0, 2, 0, 0))
    for heading in ("rule", "seeds"):
        out.add_column(heading, no_wrap=True)
    for measure in measures:
        out.add_column(measure.heading, justify="right", no_wrap=True)
    for row in found:
        cells = [_cell(row, measure, found) for measure in measures]
        out.add_row(Text(row.label), row.seeds_words, *cells)
    return out


def _cell(row: Row, measure: Measure, rivals: Sequence[Row]) -> str:
    own = row.measures[measure.name]
    known = [other.measures[measure.name].mean for other in rivals]
    best = max((measure.better * value for value in known if math.isfinite(value)), default=math.nan)
    words = own.words(measure.digits)
    return f"[bold]{words}[/]" if len(rivals) > 1 and measure.better * own.mean == best else words


def as_json(found: Sequence[Row]) -> list[dict[str, Any]]:
    return [
        {
            "setting": row.setting,
            "rule": row.label,
            "seeds": list(row.seeds),
            "seconds": round(row.seconds, 3),
            "failures": list(row.failures),
            **{name: _plain(one.mean) for name, one in row.measures.items()},
            **{f"{name}_over_seeds": _plain(one.deviation) for name, one in row.measures.items()},
        }
        for row in found
    ]


def as_csv(found: Sequence[Row]) -> str:
    lines = [{**line, "seeds": len(line["seeds"]), "failures": len(line["failures"])} for line in as_json(found)]
    out = io.StringIO()
    if lines:
        writer = csv.DictWriter(out, list(lines[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines)
    return out.getvalue()


def _plain(value: float) -> float | None:
    return round(value, 6) if math.isfinite(value) else None
