"""Turn the rounds of a simulation into the points of a learning curve.

Values of rounds are averaged between two evaluations. Everything that is not yet in a point is
available as `since_last_point`, so that a checkpoint can continue the curve exactly.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from collections.abc import Set as AbstractSet

import numpy as np

from fairfleet.common.fairness import Fairness
from fairfleet.lab.experiments.run_log import Point, Run
from fairfleet.lab.simulation.federation import RoundResult
from fairfleet.lab.simulation.trainer import ClientScores, Measured
from fairfleet.server.aggregation.admission import AdmissionFinding

DIGITS = 5  # of an accuracy: clients have fewer than a hundred thousand test samples


class Recorder:
    """Collects points, final scores and admission decisions while rounds come in.

    `honest` holds the indices of honest clients, `dishonest` the names of attackers.
    """

    def __init__(
        self,
        honest: np.ndarray,
        dishonest: AbstractSet[str] = frozenset(),
        measure: str = "accuracy",
    ) -> None:
        self.points: list[Point] = []
        self.scores: ClientScores | None = None  # of the last evaluation
        self.rounds_done = 0
        self.admission: dict[str, tuple[int, int]] = {}  # see `Run.admission`
        self.since_last_point: dict[str, list[float]] = {}  # field of a point -> value per round
        self._honest, self._dishonest, self._measure = honest, dishonest, measure

    def resume(self, earlier: Run, since_last_point: dict[str, list[float]]) -> None:
        """Continue as if the rounds of an earlier, interrupted run had been added here."""
        self.points = list(earlier.points)
        self.rounds_done = earlier.rounds
        self.admission = dict(earlier.admission)
        self.since_last_point = since_last_point
        if earlier.accuracy:
            columns = (earlier.accuracy, earlier.losses, earlier.personal)
            accuracy, loss, personal = (np.array(values, np.float64) for values in columns)
            own = np.array(earlier.measured, np.float64)
            self.scores = ClientScores(
                accuracy,
                loss,
                personal if len(personal) else None,
                Measured(own, earlier.better) if len(own) else None,
            )

    def add_round(self, result: RoundResult) -> None:
        """Add one round, and a point if the round was evaluated."""
        self.rounds_done += 1
        for name, value in _round_values(result).items():
            if value is not None and math.isfinite(value):
                self.since_last_point.setdefault(name, []).append(value)
        for finding in result.findings:
            self._count(finding)
        if result.scores is not None:
            self.scores = result.scores
            self.points.append(self._point(result, result.scores))
            self.since_last_point = {}

    def _rounded(self, value: float) -> float:
        """Round to the digits of an accuracy, or to seven digits of another measure."""
        if self._measure == "accuracy":
            return round_accuracy(value)
        return float(f"{value:.7g}")

    def measured(self, scores: ClientScores) -> Measured:
        """Return the values by which models are judged."""
        if self._measure == "loss":
            return Measured(scores.loss, "lower")
        return Measured(scores.accuracy, "higher") if scores.own is None else scores.own

    def _count(self, finding: AdmissionFinding) -> None:
        name = f"{finding.check} {finding.decision}"
        honest, attackers = self.admission.get(name, (0, 0))
        is_attacker = finding.client in self._dishonest
        self.admission[name] = (honest + (not is_attacker), attackers + is_attacker)

    def _point(self, result: RoundResult, scores: ClientScores) -> Point:
        measured = self.measured(scores)
        values = measured.values[self._honest]
        fairness = Fairness.of(
            values[np.isfinite(values)], higher_is_better=measured.direction == "higher"
        )
        means = {
            name: _mean(self.since_last_point.get(name), rounding)
            for name, rounding in ROUNDING.items()
        }
        return Point(
            round=result.round + 1,
            mean=self._rounded(fairness.mean),
            deviation=self._rounded(fairness.standard_deviation),
            worst_5=self._rounded(fairness.worst_5),
            best_5=self._rounded(fairness.best_5),
            worst_10=self._rounded(fairness.worst_10),
            best_10=self._rounded(fairness.best_10),
            improved=result.improved,
            strictly_improved=result.strictly_improved,
            **means,
        )


def round_accuracy(value: float) -> float:
    """Round a value to the digits that an accuracy has in the records."""
    return round(float(value), DIGITS)


def round_accuracies(values: np.ndarray) -> tuple[float | None, ...]:
    """Round one value per client; a value that is not finite becomes None."""
    return tuple(round_accuracy(value) if math.isfinite(value) else None for value in values)


def significant(values: np.ndarray) -> tuple[float | None, ...]:
    """Round one value per client to seven digits; a value that is not finite becomes None."""
    return tuple(float(f"{value:.7g}") if math.isfinite(value) else None for value in values)


ROUNDING: dict[str, Callable[[float], float]] = {
    "loss": round_accuracy,
    "conflicts": round_accuracy,
    "layer_conflicts": round_accuracy,
    "factor": round_accuracy,
    "update_bytes": lambda value: round(value, 1),
    # A Gram error may be far smaller than the last digit of an accuracy.
    "gram_error": lambda value: float(f"{value:.4g}"),
    "flipped": round_accuracy,
}


def _mean(values: list[float] | None, rounding: Callable[[float], float]) -> float | None:
    return rounding(float(np.mean(values))) if values else None


def _round_values(result: RoundResult) -> dict[str, float | None]:
    """Return those fields of a point that are means over rounds, for one round."""
    compression = result.compression._asdict() if result.compression else {}
    return {
        "loss": result.loss,
        "conflicts": _conflicts(result),
        "layer_conflicts": _layer_conflicts(result),
        "factor": result.factor,
        **compression,
    }


def _conflicts(result: RoundResult) -> float | None:
    """Return the share of the clients that the direction would harm.

    None if no client delivered an update, or if conflicts were not computed.
    """
    if result.diagnostics is None or result.diagnostics.conflicts is None:
        return None
    return len(result.diagnostics.conflicts) / len(result.clients)


def _layer_conflicts(result: RoundResult) -> float | None:
    """Return the same share as a mean over the layers."""
    if not result.diagnostics or not result.diagnostics.layer_conflicts:
        return None
    per_layer = [len(names) for names in result.diagnostics.layer_conflicts]
    return float(np.mean(per_layer)) / len(result.clients)
