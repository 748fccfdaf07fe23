"""Stop conditions: pure functions of time and evaluation results that end a federation.

The number of rounds belongs to the round itself (`rounds.Policy`); these are the other reasons.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class StopConditions:
    """Reasons to end the federation; None or 0 disables one."""

    after_seconds: float | None = None  # since the federation began
    # Mean accuracy of the worst-served tenth of clients that is good enough.
    worst_10_percent: float | None = None
    plateau: int = 0  # evaluations in a row without a better worst-served tenth
    plateau_margin: float = 0.001  # what counts as better


def reason_to_end(conditions: StopConditions, seconds: float, worst: Sequence[float]) -> str | None:
    """Return why the federation is to end now; None if it continues.

    `seconds` is the time since it began. `worst` is the mean accuracy of the worst-served tenth of
    clients at each evaluation so far, in order.

    >>> reason_to_end(StopConditions(worst_10_percent=0.8), 60.0, [0.5, 0.81])
    'the worst-served tenth reached 81.0 % accuracy; 80.0 % was the target'
    """
    if conditions.after_seconds is not None and seconds >= conditions.after_seconds:
        return f"{seconds:.0f} s have passed; {conditions.after_seconds:g} s were allowed"
    if not worst:
        return None
    target = conditions.worst_10_percent
    if target is not None and worst[-1] >= target:
        return (
            f"the worst-served tenth reached {_percent(worst[-1])} accuracy; "
            f"{_percent(target)} was the target"
        )
    if conditions.plateau and len(worst) > conditions.plateau:
        before, since = max(worst[: -conditions.plateau]), max(worst[-conditions.plateau :])
        if since < before + conditions.plateau_margin:
            return (
                f"{conditions.plateau} evaluations found no better worst-served tenth than "
                f"{_percent(before)}"
            )
    return None


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
