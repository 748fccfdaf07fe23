"""How long a round waits for its clients: a fixed time, or one learned from past durations.

Clients that missed the deadline count too, with the time that they were given. Learning only from
those that met it would shorten the deadline round after round, until only the fastest clients had
an influence on the model. A client that is taken to hang does not count: where many hang, each
deadline would be longer than the last.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

REMEMBERED = 500  # durations
ENOUGH = 10  # durations to learn from; with fewer, the fixed deadline applies
MORE = 2.0  # a client that missed a deadline gets so many times its time at its next selection
# Deadlines missed in a row; after more, the client is taken to hang and gets no longer deadline.
CHANCES = 5


@dataclass(frozen=True)
class TrainingDuration:
    """The duration of a client's newest training."""

    seconds: float  # a lower bound if the client missed the deadline
    missed: int = 0  # deadlines in a row

    @property
    def hangs(self) -> bool:
        """Whether the client has missed too many deadlines to wait longer for it."""
        return self.missed > CHANCES

    def cut_off(self, seconds: float) -> TrainingDuration:
        """Return the duration after the client was given so many seconds and did not answer."""
        return TrainingDuration(max(seconds, self.seconds if self.missed else 0.0), self.missed + 1)


def adaptive(
    durations: Sequence[float],
    selected: Iterable[TrainingDuration] = (),
    *,
    longest: float,
    shortest: float,
    factor: float,
) -> float:
    """Return a deadline in seconds, `factor` times the 90th percentile of past durations.

    It is longer if a selected client missed its last deadline, and lies between `shortest` and
    `longest`.

    >>> adaptive([2.0] * 20, longest=600, shortest=1, factor=3)
    6.0
    >>> adaptive([2.0] * 20, [TrainingDuration(6.0, missed=1)], longest=600, shortest=1, factor=3)
    12.0
    >>> adaptive([2.0] * 3, longest=600, shortest=1, factor=3)  # too few to learn from
    600
    """
    if len(durations) < ENOUGH:
        return longest
    usual = factor * float(np.quantile(durations, 0.9))
    slowest = max(
        (MORE * past.seconds for past in selected if past.missed and not past.hangs), default=0.0
    )
    return min(longest, max(shortest, usual, slowest))
