"""Stop conditions: pure functions of time and evaluation results that end a federation.

The number of rounds belongs to the round itself (`rounds.Policy`); these are the other reasons.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fairfleet.common.reports import Better


@dataclass(frozen=True)
class StopConditions:
    """Reasons to end the federation; None or 0 disables one."""

    after_seconds: float | None = None  # since the federation began
    # Mean of the worst-served tenth of clients that is good enough, in the measure's own unit.
    worst_10_percent: float | None = None
    plateau: int = 0  # evaluations in a row without a better worst-served tenth
    plateau_margin: float = 0.001  # what counts as better

    def on_evaluations(self) -> tuple[str, ...]:
        """Return the settings of the conditions that evaluations decide."""
        target = ("end.worst_10_percent",) if self.worst_10_percent is not None else ()
        return target + (("end.plateau",) if self.plateau else ())


def reason_to_end(
    conditions: StopConditions,
    seconds: float,
    worst: Sequence[float],
    measure: str = "accuracy",
    direction: Better = "higher",
) -> str | None:
    """Return why the federation is to end now; None if it continues.

    `seconds` is the time since it began. `worst` is the mean of `measure` over the worst-served
    tenth of clients at each evaluation so far, in order.

    >>> reason_to_end(StopConditions(worst_10_percent=0.8), 60.0, [0.5, 0.81])
    'the worst-served tenth reached 81.0 % accuracy; 80.0 % was the target'
    >>> reason_to_end(StopConditions(plateau=1), 60.0, [2.5, 2.6], "mae", "lower")
    '1 evaluations found no better worst-served tenth than mae 2.5'
    """
    if over := time_is_over(conditions.after_seconds, seconds):
        return over
    if not worst:
        return None
    sign = 1 if direction == "higher" else -1
    target = conditions.worst_10_percent
    if target is not None and sign * worst[-1] >= sign * target:
        return (
            f"the worst-served tenth reached {_text(worst[-1], measure, unit=True)}; "
            f"{_text(target, measure)} was the target"
        )
    if conditions.plateau and len(worst) > conditions.plateau:
        gains = [sign * value for value in worst]
        before, since = max(gains[: -conditions.plateau]), max(gains[-conditions.plateau :])
        if since < before + conditions.plateau_margin:
            return (
                f"{conditions.plateau} evaluations found no better worst-served tenth than "
                f"{_text(sign * before, measure, unit=measure != 'accuracy')}"
            )
    return None


def time_is_over(allowed: float | None, seconds: float) -> str | None:
    """Return that the allowed time has passed; None if it has not, or all time is allowed."""
    if allowed is None or seconds < allowed:
        return None
    passed, limit = (f"{value:.1f}".removesuffix(".0") for value in (seconds, allowed))
    return f"{passed} s have passed; {limit} s were allowed"


def _text(value: float, measure: str, *, unit: bool = False) -> str:
    """Return a value as people read it, with the measure's name if `unit` is set."""
    if measure == "accuracy":
        return f"{100 * value:.1f} %{' accuracy' if unit else ''}"
    return f"{measure if unit else ''} {value:.4g}".strip()
