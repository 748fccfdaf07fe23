"""Whether this machine may train now, by its owner's conditions.

A thread checks the conditions at intervals and stores the answer. A condition may be slow, but
reading the stored answer costs nothing, so it can be read after every training step.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence

from fairfleet.client.device.conditions import COMMAND_SECONDS, Condition

log = logging.getLogger(__name__)

EVERY_SECONDS = 30.0


class Availability:
    """The newest answer of the owner's conditions. Without conditions, it is always yes."""

    def __init__(
        self,
        conditions: Sequence[Condition] = (),
        every_seconds: float = EVERY_SECONDS,
        patience_seconds: float = 2 * COMMAND_SECONDS,
    ) -> None:
        """Check the conditions now, and then every `every_seconds` in a thread.

        An answer older than two intervals plus the patience counts as no: a condition hangs.
        """
        self.every_seconds = every_seconds
        self._conditions = conditions
        self._fresh_seconds = 2 * every_seconds + patience_seconds
        self._answer = self._check()
        self._answered = time.monotonic()
        if conditions:
            threading.Thread(target=self._keep_checking, name="conditions", daemon=True).start()

    @property
    def blocked_reason(self) -> str:
        """The reason why this machine may not train now; empty if it may."""
        if self._conditions and time.monotonic() - self._answered > self._fresh_seconds:
            return "a condition does not answer"
        return self._answer

    def _keep_checking(self) -> None:
        pause = threading.Event()
        while True:
            pause.wait(self.every_seconds)
            self._answer = self._check()
            self._answered = time.monotonic()

    def _check(self) -> str:
        """Return the first reason against training.

        All conditions are evaluated, because some measure the time since their last call.
        """
        reasons = [_evaluate(condition) for condition in self._conditions]
        return next((reason for reason in reasons if reason), "")


def _evaluate(condition: Condition) -> str:
    # A condition may be a user's code, or run on a system that we do not know: it may raise
    # anything, and a failure counts as no.
    try:
        return condition()
    except (Exception, SystemExit) as error:
        log.debug("a condition failed", exc_info=True)
        return f"a condition failed: {type(error).__name__}: {error}"
