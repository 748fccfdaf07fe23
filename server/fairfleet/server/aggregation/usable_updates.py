"""Stages a round without the updates that make its aggregation fail.

`isolation` decides which updates are left out; here its attempts are carried out.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Generic, TypeVar

import numpy as np

from fairfleet.common.errors import Bug, StateDirError, short
from fairfleet.common.names import round_name
from fairfleet.common.reports import TrainReport
from fairfleet.common.tensors import Vector
from fairfleet.server.aggregation.isolation import Attempt, isolate
from fairfleet.server.aggregation.rule_loss import LossOfRule, loss_for_rule

log = logging.getLogger(__name__)

R = TypeVar("R")  # what an attempt results in

PROGRAM_FAILURES = (Bug, StateDirError, OSError, MemoryError)  # no update is to blame for these


class UsableUpdates(Generic[R]):
    """Searches the updates of one round that can be aggregated together.

    `stage` aggregates into memory that holds one result at a time, and raises where the updates
    cannot be used. `unusable` has clients whose reports do not suffice, with the reasons.
    """

    def __init__(
        self,
        round_number: int,
        stage: Callable[[Attempt], R],
        unusable: Mapping[str, str],
    ) -> None:
        self._round, self._stage, self._unusable = round_number, stage, unusable
        self._staged: tuple[Attempt, R] | None = None
        self._failures: list[str] = []

    def stage(
        self, suspects: Sequence[str], *, has_history: bool
    ) -> tuple[R, dict[str, str]] | None:
        """Return the first result, and the clients that it leaves out with the reasons.

        `suspects` has the most conspicuous client first.
        """
        attempt = isolate(suspects, self._succeeds, has_history=has_history)
        if attempt is None:
            log.error("%s keeps the model: no update could be aggregated", round_name(self._round))
            return None
        if attempt.fresh_state:
            log.warning(
                "%s: rule and optimizer start again, their state was the cause",
                round_name(self._round),
            )
        return self._repeated(attempt), self.reasons(attempt.without)

    def reasons(self, clients: Collection[str]) -> dict[str, str]:
        """Return why these clients, and those with unusable reports, are left out of the round."""
        failure = self._failures[0] if self._failures else ""
        reason = f"the round could not be aggregated with it: {failure}"
        return {**self._unusable, **dict.fromkeys(clients, reason)}

    def _succeeds(self, attempt: Attempt) -> bool:
        self._staged = None
        usable_only = replace(attempt, without=attempt.without.union(self._unusable))
        try:
            with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
                self._staged = attempt, self._stage(usable_only)
        except PROGRAM_FAILURES:
            raise
        except Exception as error:  # whatever a rule raises, the data of an update is the cause
            self._failures.append(f"{type(error).__name__}: {short(str(error), 300)}")
            log.warning("%s cannot be aggregated (%s): %s", round_name(self._round), attempt, error)
        return self._staged is not None

    def _repeated(self, attempt: Attempt) -> R:
        """Return the result of an attempt, which may no longer be the one in memory."""
        if (self._staged is None or self._staged[0] != attempt) and not self._succeeds(attempt):
            raise Bug(
                f"{round_name(self._round)} could be aggregated once, but not again: "
                f"{self._failures[-1]}"
            )
        assert self._staged is not None
        return self._staged[1]


def conspicuous_values(
    reports: Mapping[str, TrainReport],
    buffers: Mapping[str, Vector],
    norms: Sequence[float],
    first_losses: Mapping[str, float],
    rule_loss: LossOfRule = "before",
) -> dict[str, list[float]]:
    """Return the values by which updates are compared: all that a rule may use of them.

    `reports`, `buffers` and `norms` have the same clients in the same order.
    """
    return {
        "norm": list(norms),
        "loss": [loss_for_rule(report, rule_loss) for report in reports.values()],
        "first_loss": [
            first_losses.get(
                client, report.loss_before if report.initial_loss is None else report.initial_loss
            )
            for client, report in reports.items()
        ],
        "samples": [float(report.samples) for report in reports.values()],
        "steps": [float(report.steps) for report in reports.values()],
        "learning_rate": [report.learning_rate for report in reports.values()],
        "gradient_norm": [report.gradient_norm or 0.0 for report in reports.values()],
        "accuracy": [report.accuracy or 0.0 for report in reports.values()],
        "buffers": [float(np.abs(values).max(initial=0.0)) for values in buffers.values()],
    }
