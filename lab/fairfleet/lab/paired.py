"""Codecs against raw32, seed by seed: the same data, clients and batches, so that the difference is the codec's.

A codec is judged by the mean of these differences, not by the difference of two means over other seeds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from rich.console import Group
from rich.table import Table
from rich.text import Text

from fairfleet.lab.records import Run
from fairfleet.lab.tables import Spread, in_groups, spread

RAW = "raw32"


class Bar(NamedTuple):
    """So many points may a codec cost in the mean over the seeds."""

    average: float
    worst_10: float


BARS = {"int8": Bar(0.5, 1.5), "topk:0.1": Bar(2.0, 2.0), "topsign:0.1": Bar(2.0, 2.0)}


class Difference(NamedTuple):
    """Codec minus raw32, in points, over pairs of runs with the same seed."""

    mean: float
    error: float  # standard error of the mean; NaN for a single pair

    @classmethod
    def of(cls, values: Sequence[float]) -> Difference:
        if not values:
            return cls(math.nan, math.nan)
        error = float(np.std(values, ddof=1)) / math.sqrt(len(values)) if len(values) > 1 else math.nan
        return cls(float(np.mean(values)), error)

    def words(self) -> str:
        if not math.isfinite(self.mean):
            return "-"
        return f"{self.mean:+.2f}" + (f" ± {self.error:.2f}" if math.isfinite(self.error) else "")


class Row(NamedTuple):
    """One rule with one codec."""

    setting: str
    label: str
    codec: str
    seeds: tuple[int, ...]  # whose partner is there too
    round_bytes: float  # of all updates of a round; NaN: recorded before they were counted
    ratio: float  # to raw32
    average: Spread
    deviation: Spread
    worst_10: Spread
    average_difference: Difference
    worst_difference: Difference
    late_average_difference: Difference  # of the means over the last third of the rounds: accuracy swings
    late_worst_difference: Difference
    gram_error: float
    flipped: float
    failures: int

    @property
    def differences(self) -> tuple[Difference, ...]:
        late = self.late_average_difference, self.late_worst_difference
        return self.average_difference, self.worst_difference, *late

    @property
    def verdict(self) -> str:
        """By the bar of the codec, in words."""
        bar = BARS.get(self.codec.removesuffix("+zstd"))
        if self.failures:
            return f"{self.failures} diverged"
        if self.codec == RAW or bar is None or not self.seeds:
            return ""
        found = self.average_difference.mean, self.worst_difference.mean
        words = f"{bar.average:g} / {bar.worst_10:g}"
        if all(abs(value) <= most for value, most in zip(found, bar, strict=True)):
            return f"within {words}"
        worse = any(value < -most for value, most in zip(found, bar, strict=True))
        return f"worse than {words}" if worse else f"better by more than {words}"


def rows(runs: Sequence[Run]) -> list[Row]:
    """Rule by rule, codecs in the order in which they first appear; only complete runs count."""
    done = [run for run in runs if run.complete]
    partners = {_pair(run): run for run in done if run.experiment.codec == RAW and run.honest and not run.failure}
    grouped: dict[tuple[str, str], dict[str, list[Run]]] = {}
    for run in done:
        by_codec = grouped.setdefault((_setting(run), run.label), {})
        by_codec.setdefault(run.experiment.codec, []).append(run)
    return [
        _row(setting, label, codec, found, partners)
        for (setting, label), by_codec in grouped.items()
        for codec, found in by_codec.items()
    ]


def _setting(run: Run) -> str:
    """Without the codec, which a sweep over codecs adds to it."""
    return run.setting.removesuffix(run.experiment.codec).removesuffix(", ")


def _pair(run: Run) -> str:
    """The same for runs that differ by their codec alone."""
    return run.experiment.model_copy(update={"codec": RAW, "error_feedback": True, "prediction": True}).key()


def _row(setting: str, label: str, codec: str, runs: Sequence[Run], partners: dict[str, Run]) -> Row:
    good = [run for run in runs if run.honest and not run.failure]
    pairs = [(run, partners[key]) for run in good if (key := _pair(run)) in partners]
    fairness = [(own.fairness, raw.fairness) for own, raw in pairs]
    ratio, size = _sizes(codec, good)
    return Row(
        setting,
        label,
        codec,
        tuple(own.experiment.seed for own, _ in pairs),
        size,
        ratio,
        spread([100 * run.fairness.mean for run in good]),
        spread([100 * run.fairness.standard_deviation for run in good]),
        spread([100 * run.fairness.worst_10 for run in good]),
        Difference.of([100 * (own.mean - raw.mean) for own, raw in fairness]),
        Difference.of([100 * (own.worst_10 - raw.worst_10) for own, raw in fairness]),
        _late_difference(pairs, "mean"),
        _late_difference(pairs, "worst_10"),
        spread([run.over_points("gram_error") for run in good]).mean,
        spread([run.over_points("flipped") for run in good]).mean,
        len(runs) - len(good),
    )


def _late_difference(pairs: Sequence[tuple[Run, Run]], field: str) -> Difference:
    found = [_late(own, field) - _late(raw, field) for own, raw in pairs]
    return Difference.of([100 * value for value in found if math.isfinite(value)])


def _late(run: Run, field: str) -> float:
    """The mean over the evaluations in the last third of a run; NaN where there were none."""
    known = [getattr(point, field) for point in run.points if 3 * point.round > 2 * run.rounds]
    return float(np.mean(known)) if known and None not in known else math.nan


def _sizes(codec: str, runs: Sequence[Run]) -> tuple[float, float]:
    """Of an update relative to raw32, and the bytes of all the updates of a round."""
    if not runs or not runs[0].parameters:
        return math.nan, math.nan
    whole = 4 * runs[0].parameters
    update = whole if codec == RAW else spread([run.over_points("update_bytes") for run in runs]).mean
    return update / whole, update * (runs[0].experiment.clients_per_round or len(runs[0].accuracy))


HEADINGS = (
    "rule", "codec", "seeds", "MB a round", "of raw", "average", "σ", "worst 10 %", "Δ average", "Δ worst 10 %",
    "Δ late average", "Δ late worst 10 %", "Gram error", "flipped", "verdict",
)  # fmt: skip
WORDS = ("rule", "codec", "verdict")
ABOVE = ("MB a round", "average", "σ", "worst 10 %")


def cells(row: Row) -> list[str]:
    three = [_known(one.mean, ".2f") or "-" for one in (row.average, row.deviation, row.worst_10)]
    return [
        row.label,
        row.codec,
        str(len(row.seeds)),
        _known(row.round_bytes / 1e6, ".3f"),
        _known(row.ratio, ".4f"),
        *three,
        *(one.words() if row.codec != RAW else "" for one in row.differences),
        _known(row.gram_error, ".3g"),
        _known(100 * row.flipped, ".1f", " %"),
        row.verdict,
    ]


def _known(value: float, form: str, unit: str = "") -> str:
    return f"{value:{form}}{unit}" if math.isfinite(value) else ""


def table(found: Sequence[Row], width: int = 200) -> Group:
    """For a terminal of this width, under the tables that have the accuracies themselves."""
    columns = {
        heading: [cells(row)[at] for row in found] for at, heading in enumerate(HEADINGS) if heading not in ABOVE
    }
    columns["rule"] = [f"{row.setting} {row.label}".strip() for row in found]
    first = {heading: columns.pop(heading) for heading in ("rule", "codec", "seeds")}
    beside = [[heading, *words] for heading, words in first.items()]
    groups = in_groups(((heading, [heading, *words]) for heading, words in columns.items()), beside, width)
    return Group(*(_part(first | {heading: columns[heading] for heading in group}) for group in groups))


def _part(columns: Mapping[str, Sequence[str]]) -> Table:
    out = Table(box=None, header_style="dim", padding=(0, 2, 0, 0))
    for heading in columns:
        out.add_column(heading, justify="left" if heading in WORDS else "right", no_wrap=True)
    for line in zip(*columns.values(), strict=True):
        out.add_row(*map(Text, line))
    return out


def markdown(found: Sequence[Row]) -> Iterator[str]:
    """Line by line; a table for each setting."""
    for setting in dict.fromkeys(row.setting for row in found):
        if setting:
            yield f"**{setting}**\n"
        yield f"| {' | '.join(HEADINGS)} |"
        yield f"|{'---|' * len(HEADINGS)}"
        for row in found:
            if row.setting == setting:
                yield f"| {' | '.join(cells(row))} |"
        yield ""


def as_json(found: Sequence[Row]) -> list[dict[str, Any]]:
    return [
        {
            "setting": row.setting,
            "rule": row.label,
            "codec": row.codec,
            "seeds": list(row.seeds),
            **{name: _plain(getattr(row, name)) for name in ("round_bytes", "ratio", "gram_error", "flipped")},
            **{name: _plain(getattr(row, name).mean) for name in ("average", "deviation", "worst_10")},
            "average_difference": [_plain(value) for value in row.average_difference],
            "worst_10_difference": [_plain(value) for value in row.worst_difference],
            "late_average_difference": [_plain(value) for value in row.late_average_difference],
            "late_worst_10_difference": [_plain(value) for value in row.late_worst_difference],
            "verdict": row.verdict,
        }
        for row in found
    ]


def _plain(value: float) -> float | None:
    return round(value, 6) if math.isfinite(value) else None
