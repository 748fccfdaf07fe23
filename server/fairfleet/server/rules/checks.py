"""Checks around a rule: what it may receive and what it may return.

`choose_step` is the only way in which the server calls a rule. It guarantees that the rule is
defined for every report it sees, and that every number in the step is finite.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fairfleet.server.rules.base import Losses, Needs, Rule, State, Step
from fairfleet.server.rules.cohort import Cohort, PastRow
from fairfleet.server.rules.errors import NonFiniteChoice, RuleError, UnusableReport

OVERFLOW_REMEDY = (
    "leave out the longest or the shortest updates and the largest reports, or limit them "
    "(admission)"
)
EXPECTED_LOSS: Mapping[Losses, str] = {
    "any": "finite",
    "non_negative": "zero or above",
    "positive": "above zero",
}
LOSS_REMEDY: Mapping[Losses, str] = {
    "any": "Report a finite loss",
    "non_negative": "Add a constant to the clients' loss that keeps it at zero or above, the same "
    "for all of them, or choose a rule that takes any loss (fedmgda_plus, fedfv, afl, term, "
    "fedgini)",
    "positive": "Add a constant to the clients' loss that keeps it above zero, the same for all of "
    "them, or choose a rule that takes any loss (fedmgda_plus, fedfv, afl, term, fedgini)",
}


def choose_step(rule: Rule, cohort: Cohort, state: State) -> Step:
    """Return the rule's step for this cohort; all its numbers are finite.

    Raises UnusableReport for a report for which the rule is not defined, NonFiniteChoice where
    its arithmetic overflowed, and RuleError for a number that it cannot process.
    """
    needs = rule.needs()
    check_reports(cohort, needs)
    try:
        with np.errstate(all="ignore"):  # the result is checked below
            step = rule.step(without_undefined_losses(cohort, needs.losses), state)
    except (ArithmeticError, np.linalg.LinAlgError) as error:
        raise RuleError(
            f"{type(rule).__name__} failed on the updates of this round: {error}; {OVERFLOW_REMEDY}"
        ) from error
    check_step(rule, step)
    return step


def accepts_loss(losses: Losses, loss: float) -> bool:
    """Return whether a rule that is defined for `losses` is defined for this loss."""
    match losses:
        case "non_negative":
            return 0.0 <= loss < np.inf
        case "positive":
            return 0.0 < loss < np.inf
    return bool(np.isfinite(loss))


def check_reports(cohort: Cohort, needs: Needs) -> None:
    """Raise UnusableReport, which names the clients, for reports the rule is not defined for."""
    refused_losses = [
        (client, report.loss)
        for client, report in zip(cohort.clients, cohort.reports, strict=True)
        if not accepts_loss(needs.losses, report.loss)
    ]
    _refuse("loss", refused_losses, EXPECTED_LOSS[needs.losses], LOSS_REMEDY[needs.losses])
    _check_values(cohort, "samples", cohort.samples >= 0.0, "zero or above")
    for name in dict.fromkeys([*needs.reports, *needs.positive]):
        positive = name in needs.positive
        values = cohort.reported(name)
        expected = "above zero" if positive else "finite"
        _check_values(cohort, name, (values > 0.0) | (not positive), expected)


def _check_values(cohort: Cohort, name: str, allowed: NDArray[np.bool_], expected: str) -> None:
    values = cohort.reported(name)
    wrong = np.flatnonzero(~(allowed & np.isfinite(values))).tolist()
    refused = [(cohort.clients[index], float(values[index])) for index in wrong]
    remedy = "Correct the task that measures it, or choose a rule that does not need it"
    _refuse(name, refused, expected, remedy)


def _refuse(name: str, refused: Sequence[tuple[str, float]], expected: str, remedy: str) -> None:
    """Raise UnusableReport if there is any (client, value) pair."""
    if refused:
        values = ", ".join(f"{value:g} from {client}" for client, value in refused[:5])
        raise UnusableReport(
            f"this rule cannot take a {name} of {values}; expected {expected}. {remedy}",
            [client for client, _ in refused],
        )


def without_undefined_losses(cohort: Cohort, losses: Losses) -> Cohort:
    """Return the cohort without past losses for which the rule is not defined.

    They may have been reported under another rule, and an absent client cannot correct them. A
    history row without a loss is not used as an objective.
    """

    def usable(row: PastRow) -> bool:
        return row.loss is None or accepts_loss(losses, row.loss)

    if losses == "any" or all(usable(row) for row in cohort.history):
        return cohort
    rows = [row if usable(row) else replace(row, loss=None) for row in cohort.history]
    return replace(cohort, history=rows)


def check_step(rule: Rule, step: Step) -> None:
    """Raise NonFiniteChoice unless coefficients, certainty and next state are finite."""
    name = type(rule).__name__
    if not np.isfinite(step.coefficients).all():
        raise NonFiniteChoice(f"{name} gives coefficients that are not finite; {OVERFLOW_REMEDY}")
    if not np.isfinite(step.certainty):
        raise NonFiniteChoice(f"{name} gives a certainty of {step.certainty}; {OVERFLOW_REMEDY}")
    if not _is_finite(step.state.model_dump()):
        raise NonFiniteChoice(
            f"{name} would remember numbers that are not finite; {OVERFLOW_REMEDY}"
        )


def _is_finite(value: Any) -> bool:
    """Return whether every float in a nested value is finite."""
    match value:
        case float():
            return bool(np.isfinite(value))
        case Mapping():
            return all(_is_finite(item) for item in value.values())
        case list() | tuple():
            return all(_is_finite(item) for item in value)
    return True
