"""For how long the federation has run: while a server runs and the federation is not finished.

The clock is monotonic within a run of the server, and goes on from the recorded time after a
restart. So neither a jump of the wall clock nor a server that is down brings the end nearer.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from fairfleet.server.storage.operations.progress import elapsed_write
from fairfleet.server.storage.queries import Write


class TrainingClock:
    """Counts seconds while it runs.

    >>> times = iter([10.0, 15.0, 15.0, 100.0, 103.0])
    >>> clock = TrainingClock(60.0, lambda: next(times))
    >>> clock.seconds()
    65.0
    >>> clock.halt(), clock.seconds()
    (None, 65.0)
    >>> clock.run(), clock.seconds()
    (None, 68.0)
    """

    def __init__(
        self, recorded_seconds: float, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._monotonic = monotonic
        self._before = recorded_seconds  # until `_since`
        self._since: float | None = monotonic()  # None: the clock stands still

    def seconds(self) -> float:
        """Return the time that was counted so far."""
        return self._before + (0.0 if self._since is None else self._monotonic() - self._since)

    def halt(self) -> None:
        """Stop counting: the federation is finished."""
        self._before, self._since = self.seconds(), None

    def run(self) -> None:
        """Count again: the federation goes on."""
        if self._since is None:
            self._since = self._monotonic()

    def write(self) -> Write:
        """Return the write that records the time until now."""
        return elapsed_write(self.seconds())
