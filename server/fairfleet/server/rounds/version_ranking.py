"""Compare evaluated versions of the model: pure functions of what clients reported.

A version is as good as it is for the worst-served tenth of the clients that evaluated it, because
`end.plateau` compares evaluations in the same way. Versions that are equal there are compared by
the mean over all clients, and of equal versions the earliest is the best.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from fairfleet.common import fairness
from fairfleet.common.reports import Better, Evaluation, Measure

ACCURACY, LOSS = "accuracy", "loss"


@dataclass(frozen=True)
class VersionScore:
    """One measure of one version, over the clients that reported it."""

    measure: str
    higher_is_better: bool
    mean: float
    worst_10_percent: float  # mean of the worst-served tenth
    clients: int

    def rank(self) -> tuple[float, float]:
        """Return a key for comparing versions: the greater, the better."""
        sign = 1.0 if self.higher_is_better else -1.0
        return sign * self.worst_10_percent, sign * self.mean


Scores = Mapping[str, VersionScore]  # of one version, by measure


def version_scores(
    reported: Iterable[Evaluation], direction_of: Callable[[str], Better] | None = None
) -> dict[str, VersionScore]:
    """Return the scores of one version by measure, given what each client reported.

    `direction_of` returns which values of a measure are better; None: the reports say so.

    >>> reported = [Evaluation(samples=1, loss=loss) for loss in (0.5, 2.0)]
    >>> version_scores(reported)["loss"].worst_10_percent
    2.0
    """
    by_measure: dict[str, list[Measure]] = {}
    for evaluation in reported:
        for name, figure in evaluation.figures().items():
            by_measure.setdefault(name, []).append(figure)
    return {
        measure: _score(
            measure, values, direction_of(measure) if direction_of else values[0].direction
        )
        for measure, values in sorted(by_measure.items())
    }


def chosen_measure(scores: Iterable[Scores]) -> str | None:
    """Return the measure that versions are compared by: accuracy if any has it, else the loss."""
    reported = {measure for version in scores for measure in version}
    return ACCURACY if ACCURACY in reported else LOSS if LOSS in reported else None


def best_version(scores: Mapping[int, Scores], measure: str) -> int | None:
    """Return the best version by a measure; None if no version was evaluated by it."""
    ranks = {
        version: of_version[measure].rank()
        for version, of_version in sorted(scores.items())
        if measure in of_version
    }
    return max(ranks, key=ranks.__getitem__, default=None)


def _score(measure: str, figures: Sequence[Measure], direction: Better) -> VersionScore:
    higher = direction == "higher"
    values = [figure.value for figure in figures]
    worst = fairness.worst(values, 10, higher_is_better=higher)
    return VersionScore(measure, higher, fairness.mean(values), worst, len(values))
