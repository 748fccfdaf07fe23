"""Whether this machine takes part just now, by its owner's conditions.

A thread asks them every so often and keeps the answer: a condition may be slow, and reading the answer costs nothing,
so it can be read after every training step.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence

from fairfleet.client.conditions import COMMAND_SECONDS, Condition

log = logging.getLogger(__name__)

EVERY_SECONDS = 30.0


class Willing:
    def __init__(
        self,
        conditions: Sequence[Condition] = (),
        every_seconds: float = EVERY_SECONDS,
        patience_seconds: float = 2 * COMMAND_SECONDS,
    ) -> None:
        """An answer that is older than two turns and the patience counts as no: a condition hangs."""
        self.every_seconds = every_seconds
        self._conditions = conditions
        self._fresh_seconds = 2 * every_seconds + patience_seconds
        self._answer = self._ask()
        self._answered = time.monotonic()
        if conditions:
            threading.Thread(target=self._keep_asking, name="conditions", daemon=True).start()

    @property
    def why_not(self) -> str:
        """Empty: now is fine."""
        if self._conditions and time.monotonic() - self._answered > self._fresh_seconds:
            return "a condition does not answer"
        return self._answer

    def _keep_asking(self) -> None:
        pause = threading.Event()
        while True:
            pause.wait(self.every_seconds)
            self._answer = self._ask()
            self._answered = time.monotonic()

    def _ask(self) -> str:
        """The first reason there is. All are asked, so that each sees every stretch of time."""
        reasons = []
        for condition in self._conditions:
            try:
                reasons.append(condition())
            except (Exception, SystemExit) as error:  # a stranger's code, or a system that is another than we know
                log.debug("a condition failed", exc_info=True)
                reasons.append(f"a condition failed: {type(error).__name__}: {error}")
        return next((reason for reason in reasons if reason), "")
