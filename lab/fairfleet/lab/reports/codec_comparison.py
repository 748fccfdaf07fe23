"""Compare codecs with raw32 seed by seed.

Two runs of a pair have the same data, clients and batches, so their difference is due to the codec.
A codec is judged by the mean of these differences, not by the difference of two means over
different seeds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from fairfleet.lab.experiments.run_log import Run
from fairfleet.lab.reports.measures import SeedSpread, spread
from fairfleet.lab.reports.result_rows import runs_with_result

RAW = "raw32"


class Bar(NamedTuple):
    """The most points that a codec may cost, as a mean over the seeds."""

    average: float
    worst_10: float


BARS = {"int8": Bar(0.5, 1.5), "topk:0.1": Bar(2.0, 2.0), "topsign:0.1": Bar(2.0, 2.0)}


class Difference(NamedTuple):
    """Codec minus raw32, in percentage points, over pairs of runs with the same seed."""

    mean: float
    error: float  # standard error of the mean; NaN for a single pair

    @classmethod
    def of(cls, values: Sequence[float]) -> Difference:
        """Return mean and standard error of these differences; NaN where there are too few."""
        if not values:
            return cls(math.nan, math.nan)
        count = len(values)
        error = float(np.std(values, ddof=1)) / math.sqrt(count) if count > 1 else math.nan
        return cls(float(np.mean(values)), error)

    def format(self) -> str:
        """Return `+mean ± error`; `-` if there is no mean."""
        if not math.isfinite(self.mean):
            return "-"
        return f"{self.mean:+.2f}" + (f" ± {self.error:.2f}" if math.isfinite(self.error) else "")


class CodecRow(NamedTuple):
    """One rule with one codec."""

    setting: str
    label: str
    codec: str
    seeds: tuple[int, ...]  # of the runs whose raw32 partner is recorded too
    round_bytes: float  # of all updates of a round; NaN in records that are older than this field
    ratio: float  # size of an update relative to raw32
    average: SeedSpread
    deviation: SeedSpread
    worst_10: SeedSpread
    average_difference: Difference
    worst_difference: Difference
    # Accuracy swings from round to round, so means over the last third are compared as well.
    late_average_difference: Difference
    late_worst_difference: Difference
    gram_error: float
    flipped: float
    failures: int

    @property
    def differences(self) -> tuple[Difference, ...]:
        """Return all differences, in the order of their columns."""
        late = self.late_average_difference, self.late_worst_difference
        return self.average_difference, self.worst_difference, *late

    @property
    def verdict(self) -> str:
        """Return in words whether the codec stays within its bar; empty without a bar."""
        bar = BARS.get(self.codec.removesuffix("+zstd"))
        if self.failures:
            return f"{self.failures} diverged"
        if self.codec == RAW or bar is None or not self.seeds:
            return ""
        means = self.average_difference.mean, self.worst_difference.mean
        limits = f"{bar.average:g} / {bar.worst_10:g}"
        if all(abs(mean) <= limit for mean, limit in zip(means, bar, strict=True)):
            return f"within {limits}"
        is_worse = any(mean < -limit for mean, limit in zip(means, bar, strict=True))
        return f"worse than {limits}" if is_worse else f"better by more than {limits}"


def codec_rows(runs: Sequence[Run]) -> list[CodecRow]:
    """Return rows by rule, with codecs in the order in which they appear.

    Only complete runs count.
    """
    complete = [run for run in runs if run.complete]
    raw_runs = [run for run in runs_with_result(complete) if run.experiment.codec == RAW]
    partners = {_pair_key(run): run for run in raw_runs}
    groups: dict[tuple[str, str], dict[str, list[Run]]] = {}
    for run in complete:
        by_codec = groups.setdefault((_setting(run), run.label), {})
        by_codec.setdefault(run.experiment.codec, []).append(run)
    return [
        _row(setting, label, codec, codec_runs, partners)
        for (setting, label), by_codec in groups.items()
        for codec, codec_runs in by_codec.items()
    ]


def _setting(run: Run) -> str:
    """Return the setting without the codec, which a sweep over codecs appends to it."""
    return run.setting.removesuffix(run.experiment.codec).removesuffix(", ")


def _pair_key(run: Run) -> str:
    """Return a key that is the same for runs that differ in their codec only."""
    return run.experiment.model_copy(
        update={"codec": RAW, "error_feedback": True, "prediction": True}
    ).key()


def _row(
    setting: str, label: str, codec: str, runs: Sequence[Run], partners: dict[str, Run]
) -> CodecRow:
    counted = runs_with_result(runs)
    pairs = [(run, partners[key]) for run in counted if (key := _pair_key(run)) in partners]
    fairness = [(own.fairness, raw.fairness) for own, raw in pairs]
    ratio, round_bytes = _sizes(codec, counted)
    return CodecRow(
        setting=setting,
        label=label,
        codec=codec,
        seeds=tuple(own.experiment.seed for own, _ in pairs),
        round_bytes=round_bytes,
        ratio=ratio,
        average=spread([100 * run.fairness.mean for run in counted]),
        deviation=spread([100 * run.fairness.standard_deviation for run in counted]),
        worst_10=spread([100 * run.fairness.worst_10 for run in counted]),
        average_difference=Difference.of([100 * (own.mean - raw.mean) for own, raw in fairness]),
        worst_difference=Difference.of(
            [100 * (own.worst_10 - raw.worst_10) for own, raw in fairness]
        ),
        late_average_difference=_late_difference(pairs, "mean"),
        late_worst_difference=_late_difference(pairs, "worst_10"),
        gram_error=spread([run.over_points("gram_error") for run in counted]).mean,
        flipped=spread([run.over_points("flipped") for run in counted]).mean,
        failures=len(runs) - len(counted),
    )


def _late_difference(pairs: Sequence[tuple[Run, Run]], field: str) -> Difference:
    differences = [_late_mean(own, field) - _late_mean(raw, field) for own, raw in pairs]
    return Difference.of([100 * value for value in differences if math.isfinite(value)])


def _late_mean(run: Run, field: str) -> float:
    """Return the mean over the evaluations in the last third of a run; NaN if it has none."""
    values = [getattr(point, field) for point in run.points if 3 * point.round > 2 * run.rounds]
    return float(np.mean(values)) if values and None not in values else math.nan


def _sizes(codec: str, runs: Sequence[Run]) -> tuple[float, float]:
    """Return the size of an update relative to raw32, and the bytes of all updates of a round."""
    if not runs or not runs[0].parameters:
        return math.nan, math.nan
    raw_bytes = 4 * runs[0].parameters
    coded_bytes = spread([run.over_points("update_bytes") for run in runs]).mean
    update_bytes = raw_bytes if codec == RAW else coded_bytes
    clients = runs[0].experiment.clients_per_round or len(runs[0].accuracy)
    return update_bytes / raw_bytes, update_bytes * clients
