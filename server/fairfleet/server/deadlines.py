"""How long a round waits for its clients: a fixed time, or one learned from how long they took before.

Whoever was cut off counts too, with the time that it was given: learning only from those who made it would shorten
the deadline round after round, until none but the fastest had a say in the model. Only who is taken to hang does not:
where many do, each deadline would be longer than the last.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

REMEMBERED = 500  # durations
ENOUGH = 10  # durations to learn from; with fewer the fixed deadline holds
MORE = 2.0  # times what a client that was cut off was given, it gets when it is next asked
CHANCES = 5  # deadlines missed in a row; then the client is taken to hang, and nobody waits longer for it


@dataclass(frozen=True)
class Pace:
    """A client's newest training."""

    seconds: float  # that it took; if it was cut off, that it took at least
    missed: int = 0  # deadlines in a row

    @property
    def hangs(self) -> bool:
        return self.missed > CHANCES

    def cut_off(self, seconds: float) -> Pace:
        """It was given so long and did not answer."""
        return Pace(max(seconds, self.seconds if self.missed else 0.0), self.missed + 1)


def adaptive(
    durations: Sequence[float], asked: Iterable[Pace] = (), *, longest: float, shortest: float, factor: float
) -> float:
    """`factor` times what nine of ten past trainings took, and longer where somebody is asked who was cut off.

    >>> adaptive([2.0] * 20, longest=600, shortest=1, factor=3)
    6.0
    >>> adaptive([2.0] * 20, [Pace(6.0, missed=1)], longest=600, shortest=1, factor=3)
    12.0
    >>> adaptive([2.0] * 3, longest=600, shortest=1, factor=3)  # too few to learn from
    600
    """
    if len(durations) < ENOUGH:
        return longest
    usual = factor * float(np.quantile(durations, 0.9))
    behind = max((MORE * pace.seconds for pace in asked if pace.missed and not pace.hangs), default=0.0)
    return min(longest, max(shortest, usual, behind))
