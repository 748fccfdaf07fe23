"""What an evaluation says of the fleet, and what a step means for it, in numbers that can be shown.

Pure: made from the records alone, so that what is shown live and what is shown after a restart is the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fairfleet.common.fairness import Fairness, improved_share
from fairfleet.common.reports import Evaluation
from fairfleet.server.evaluating import GONE, NO_TEST_DATA, SILENT

Evaluations = Mapping[str, Evaluation]  # by client
OUTCOMES = ("reported", "failed", "silent", "no_test_data")
REMEMBERED_ROUNDS = 200  # over which conflicts are counted


@dataclass(frozen=True)
class Served:
    """How the fleet was served by the newest version that it was to evaluate; perhaps no client could."""

    version: int
    loss: Fairness | None  # None: there are no results
    accuracy: Fairness | None  # None: no client measures it
    improved: float | None  # share of clients whose loss fell since the evaluation before; None: there is none
    evaluations: Evaluations
    failures: Mapping[str, str] = field(default_factory=dict)  # by client: why it gave no result

    @classmethod
    def of(cls, version: int, now: Evaluations, before: Evaluations, failures: Mapping[str, str]) -> Served:
        accuracies = [found.accuracy for found in now.values() if found.accuracy is not None]
        both = sorted(now.keys() & before.keys())
        pairs = [before[client].loss for client in both], [now[client].loss for client in both]
        losses = [found.loss for found in now.values()]
        return cls(
            version=version,
            loss=Fairness.of(losses, higher_is_better=False) if losses else None,
            accuracy=Fairness.of(accuracies) if accuracies else None,
            improved=improved_share(*pairs, higher_is_better=False) if both else None,
            evaluations=now,
            failures=failures,
        )

    def outcomes(self) -> dict[str, int]:
        kinds = {NO_TEST_DATA: "no_test_data", GONE: "silent", SILENT: "silent"}
        tally = Counter(kinds.get(why, "failed") for why in self.failures.values())
        return {outcome: tally[outcome] for outcome in OUTCOMES} | {"reported": len(self.evaluations)}


@dataclass(frozen=True)
class Spread:
    """Of the coefficients that a rule gave to its clients; of their means where every layer has its own."""

    min: float
    mean: float
    max: float
    standard_deviation: float

    @classmethod
    def of(cls, coefficients: Iterable[float]) -> Spread | None:
        values = np.fromiter(coefficients, np.float64)
        if not len(values):
            return None
        return cls(float(values.min()), float(values.mean()), float(values.max()), float(values.std()))


@dataclass(frozen=True)
class StepTaken:
    """What the newest step means for the clients of its round."""

    conflicts: frozenset[str]  # clients that its direction harms
    layer_conflicts: tuple[int, ...]  # per layer: how many
    norm: float | None
    standing_in: int  # history rows of absent clients that the rule took account of
    status: str  # "ok", or the fallback that was taken
    coefficients: Mapping[str, float]
    cosines: Mapping[str, float]  # between update and direction
    spread: Spread | None

    @property
    def conflicting_layers(self) -> int:
        return sum(count > 0 for count in self.layer_conflicts)

    @classmethod
    def of(cls, diagnostics: Mapping[str, Any]) -> StepTaken:
        coefficients = {client: _mean(value) for client, value in diagnostics["coefficients"].items()}
        return cls(
            conflicts=frozenset(diagnostics["conflicts"]),
            layer_conflicts=tuple(len(clients) for clients in diagnostics["layer_conflicts"]),
            norm=diagnostics["direction_norm"],
            standing_in=len(diagnostics["history_coefficients"]),
            status=diagnostics["status"],
            coefficients=coefficients,
            cosines=diagnostics["cosines"],
            spread=Spread.of(coefficients.values()),
        )


def _mean(coefficient: float | list[float]) -> float:
    """Over the layers, where each has its own."""
    return sum(coefficient) / len(coefficient) if isinstance(coefficient, list) else coefficient


class Conflicts:
    """Who was in conflict how often, over the rounds remembered, and for how many of its own rounds in a row."""

    def __init__(self, remembered: int = REMEMBERED_ROUNDS) -> None:
        self._remembered = remembered
        self._rounds: dict[int, frozenset[str]] = {}
        self.counts: Counter[str] = Counter()
        self.streaks: Counter[str] = Counter()

    def add(self, round: int, clients: Iterable[str], conflicts: frozenset[str]) -> None:
        """`clients` took part in the round; whoever did not neither ends nor prolongs a streak."""
        if round in self._rounds:
            return
        self._rounds[round] = conflicts
        self.counts.update(conflicts)
        for client in clients:
            if client in conflicts:
                self.streaks[client] += 1
            else:
                self.streaks.pop(client, None)
        if len(self._rounds) > self._remembered:
            self.counts.subtract(self._rounds.pop(min(self._rounds)))

    def forget(self, clients: Iterable[str]) -> None:
        """They were revoked: nobody can do anything for them any more."""
        for client in clients:
            self.streaks.pop(client, None)

    def longest_streak(self, among: Iterable[str]) -> int:
        return max((self.streaks[client] for client in among), default=0)
