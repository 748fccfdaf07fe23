"""When a federation has trained enough: pure functions of time and of what evaluations found.

The number of rounds belongs to the round itself (`rounds.Policy`); these are the other reasons.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Ending:
    """None, or 0: not a reason to end."""

    after_seconds: float | None = None  # of training since the federation began
    worst_10_percent: float | None = None  # mean accuracy of the worst-served tenth that is good enough
    plateau: int = 0  # evaluations in a row without a better worst-served tenth
    plateau_margin: float = 0.001  # what counts as better


def reason_to_end(ending: Ending, seconds: float, worst: Sequence[float]) -> str | None:
    """`worst` is the mean accuracy of the worst-served tenth at each evaluation so far, in order.

    >>> reason_to_end(Ending(worst_10_percent=0.8), 60.0, [0.5, 0.81])
    'the worst-served tenth reached 81.0 % accuracy; 80.0 % was the target'
    """
    if ending.after_seconds is not None and seconds >= ending.after_seconds:
        return f"{seconds:.0f} s have passed; {ending.after_seconds:g} s were allowed"
    if not worst:
        return None
    target = ending.worst_10_percent
    if target is not None and worst[-1] >= target:
        return f"the worst-served tenth reached {_percent(worst[-1])} accuracy; {_percent(target)} was the target"
    if ending.plateau and len(worst) > ending.plateau:
        before, since = max(worst[: -ending.plateau]), max(worst[-ending.plateau :])
        if since < before + ending.plateau_margin:
            return f"{ending.plateau} evaluations found no better worst-served tenth than {_percent(before)}"
    return None


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
