"""Figures to show of an evaluation and of an aggregation step.

The functions are pure and read only records, so a restart does not change what is shown.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from fairfleet.common.fairness import Fairness, improved_share
from fairfleet.common.reports import BUILT_IN, MAX_MEASURES, Better, Evaluation, Measure
from fairfleet.server.rounds.missing_evaluations import GONE, NO_TEST_DATA, SILENT

Evaluations = Mapping[str, Evaluation]  # by client
OUTCOMES = ("reported", "failed", "silent", "no_test_data")
REMEMBERED_ROUNDS = 200  # over which conflicts are counted


class Comparison(NamedTuple):
    """How the federation compares versions."""

    measure: str = ""  # always shown; empty while it is not known
    # Returns which values of a measure are better; None: the reports say so.
    direction_of: Callable[[str], Better] | None = None


BY_REPORTS = Comparison()


@dataclass(frozen=True)
class FleetEvaluation:
    """The results of all clients for one model version; there may be none."""

    version: int
    # Share of clients that do as well as at the previous evaluation or better, by their loss if
    # they have one; None: there is none.
    improved: float | None
    strictly_improved: float | None  # share of those that do better
    evaluations: Evaluations
    failures: Mapping[str, str] = field(default_factory=dict)  # by client: why it has no result
    # By measure, for loss, accuracy and those of tasks that most clients report.
    fairness: Mapping[str, Fairness] = field(default_factory=dict)
    directions: Mapping[str, Better] = field(default_factory=dict)  # of the same measures

    @classmethod
    def of(
        cls,
        version: int,
        evaluations: Evaluations,
        previous: Evaluations,
        failures: Mapping[str, str],
        comparison: Comparison = BY_REPORTS,
    ) -> FleetEvaluation:
        """Summarize the results for a version; `previous` are those to compare with."""
        figures = [evaluation.figures() for evaluation in evaluations.values()]
        directions = _shown_directions(figures, comparison)
        improved, strictly_improved = _improved(evaluations, previous, directions)
        return cls(
            version=version,
            improved=improved,
            strictly_improved=strictly_improved,
            evaluations=evaluations,
            failures=failures,
            fairness={
                name: Fairness.of(
                    [row[name].value for row in figures if name in row],
                    higher_is_better=direction == "higher",
                )
                for name, direction in directions.items()
            },
            directions=directions,
        )

    @property
    def loss(self) -> Fairness | None:
        """The figures of the loss; None: no client has one."""
        return self.fairness.get("loss")

    @property
    def accuracy(self) -> Fairness | None:
        """The figures of the accuracy; None: no client measures it."""
        return self.fairness.get("accuracy")

    @property
    def own(self) -> dict[str, Fairness]:
        """The figures of the tasks' own measures, by name."""
        return {name: row for name, row in self.fairness.items() if name not in BUILT_IN}

    def by_client(self, name: str) -> dict[str, float]:
        """Return the values of a measure, by client that reports it."""
        values = {client: result.figure(name) for client, result in self.evaluations.items()}
        return {client: value for client, value in values.items() if value is not None}

    def values(self, name: str) -> list[float]:
        """Return the values of a measure of all clients that report it."""
        return list(self.by_client(name).values())

    def outcomes(self) -> dict[str, int]:
        """Return the number of clients by outcome; every outcome has a count."""
        outcome_of = {NO_TEST_DATA: "no_test_data", GONE: "silent", SILENT: "silent"}
        counts = Counter(outcome_of.get(reason, "failed") for reason in self.failures.values())
        counts["reported"] = len(self.evaluations)
        return {outcome: counts[outcome] for outcome in OUTCOMES}


def _shown_directions(
    figures: Iterable[Mapping[str, Measure]], comparison: Comparison
) -> dict[str, Better]:
    """Return loss and accuracy, and then the other measures that most clients report.

    The measure by which versions are compared is among them, if anyone reports it.
    """
    directions: dict[str, Better] = {}
    counts = Counter[str]()
    for row in figures:
        counts.update(row.keys())
        for name, figure in row.items():
            directions.setdefault(name, figure.direction)
    own = sorted(
        counts.keys() - BUILT_IN.keys(),
        key=lambda name: (name != comparison.measure, -counts[name], name),
    )
    shown = [name for name in BUILT_IN if name in counts] + own[:MAX_MEASURES]
    direction_of = comparison.direction_of or directions.__getitem__
    return {name: direction_of(name) for name in shown}


def _improved(
    evaluations: Evaluations, previous: Evaluations, directions: Mapping[str, Better]
) -> tuple[float | None, float | None]:
    """Return the share of clients that do no worse than before, and of those that do better."""
    clients = sorted(evaluations.keys() & previous.keys())
    for name, direction in directions.items():
        pairs = [
            (previous[client].figure(name), evaluations[client].figure(name)) for client in clients
        ]
        known = [(old, new) for old, new in pairs if old is not None and new is not None]
        if known:
            before, after = zip(*known, strict=True)
            shares = (
                improved_share(
                    before, after, higher_is_better=direction == "higher", strictly=strictly
                )
                for strictly in (False, True)
            )
            return next(shares), next(shares)
    return None, None


@dataclass(frozen=True)
class CoefficientSpread:
    """Statistics of the coefficients of clients: of their means if each layer has its own."""

    min: float
    mean: float
    max: float
    standard_deviation: float

    @classmethod
    def of(cls, coefficients: Iterable[float]) -> CoefficientSpread | None:
        """Return the statistics of coefficients; None without any."""
        values = np.fromiter(coefficients, np.float64)
        if not len(values):
            return None
        return cls(
            float(values.min()), float(values.mean()), float(values.max()), float(values.std())
        )


@dataclass(frozen=True)
class StepTaken:
    """What a step means for the clients of its round."""

    conflicts: frozenset[str] | None  # clients that its direction harms; None: not computed
    layer_conflicts: tuple[int, ...] | None  # number of them per layer; None: not computed
    norm: float | None
    standing_in: int  # history rows of absent clients that the rule used
    status: str  # "ok", or the fallback that was used
    coefficients: Mapping[str, float]
    cosines: Mapping[str, float]  # between update and direction
    spread: CoefficientSpread | None
    # The level of the diagnostics; None: there was no step, or the record is older than levels.
    level: str | None = None

    @property
    def conflicting_layers(self) -> int | None:
        """The number of layers in which the direction harms a client; None: not computed."""
        if self.layer_conflicts is None:
            return None
        return sum(count > 0 for count in self.layer_conflicts)

    @classmethod
    def of(cls, diagnostics: Mapping[str, Any]) -> StepTaken:
        """Read a round's diagnostics; raise KeyError if one is missing that its level has."""
        coefficients = {
            client: _mean(value) for client, value in diagnostics["coefficients"].items()
        }
        level = diagnostics.get("level")  # "model" and "off" leave figures out
        conflicts = None if level == "off" else diagnostics["conflicts"]
        layers = None if level in ("model", "off") else diagnostics["layer_conflicts"]
        return cls(
            conflicts=None if conflicts is None else frozenset(conflicts),
            layer_conflicts=None if layers is None else tuple(map(len, layers)),
            norm=diagnostics["direction_norm"],
            standing_in=len(diagnostics["history_coefficients"]),
            status=diagnostics["status"],
            coefficients=coefficients,
            cosines=diagnostics["cosines"],
            spread=CoefficientSpread.of(coefficients.values()),
            level=level,
        )


def _mean(coefficient: float | list[float]) -> float:
    """Return the mean over the layers if each has a coefficient of its own."""
    return sum(coefficient) / len(coefficient) if isinstance(coefficient, list) else coefficient


class Conflicts:
    """Counts of conflicts by client over the newest rounds, and streaks.

    A streak is the number of a client's own rounds, in a row until now, whose direction harmed it.
    """

    def __init__(self, remembered: int = REMEMBERED_ROUNDS) -> None:
        self._remembered = remembered
        self._rounds: dict[int, frozenset[str]] = {}
        self.counts: Counter[str] = Counter()
        self.streaks: Counter[str] = Counter()

    @property
    def are_known(self) -> bool:
        """Whether any remembered round has computed conflicts."""
        return bool(self._rounds)

    def add(
        self, round_number: int, clients: Iterable[str], conflicts: frozenset[str] | None
    ) -> None:
        """Count the conflicts of a round in which `clients` took part.

        The streaks of other clients do not change. A round is counted once. A round whose
        conflicts were not computed (None) changes nothing.
        """
        if round_number in self._rounds or conflicts is None:
            return
        self._rounds[round_number] = conflicts
        self.counts.update(conflicts)
        for client in clients:
            if client in conflicts:
                self.streaks[client] += 1
            else:
                self.streaks.pop(client, None)
        if len(self._rounds) > self._remembered:
            self.counts.subtract(self._rounds.pop(min(self._rounds)))

    def forget(self, clients: Iterable[str]) -> None:
        """End the streaks of clients that were revoked."""
        for client in clients:
            self.streaks.pop(client, None)

    def longest_streak(self, clients: Iterable[str]) -> int:
        """Return the longest streak of these clients; 0 without any."""
        return max((self.streaks[client] for client in clients), default=0)
