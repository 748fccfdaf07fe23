"""Whether this machine takes part just now, by its owner's conditions.

A thread asks them every so often and keeps the answer: a condition may be slow, and reading the answer costs nothing,
so it can be read after every training step.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

from fairfleet.client.conditions import Condition

log = logging.getLogger(__name__)

EVERY_SECONDS = 30.0


class Willing:
    def __init__(self, conditions: Sequence[Condition] = (), every_seconds: float = EVERY_SECONDS) -> None:
        self.every_seconds = every_seconds
        self._conditions = conditions
        self.why_not = ""  # empty: now is fine
        if conditions:
            self.why_not = self._ask()
            threading.Thread(target=self._keep_asking, name="conditions", daemon=True).start()

    def _keep_asking(self) -> None:
        pause = threading.Event()
        while True:
            pause.wait(self.every_seconds)
            self.why_not = self._ask()

    def _ask(self) -> str:
        """The first reason there is. All are asked, so that each sees every stretch of time."""
        reasons = []
        for condition in self._conditions:
            try:
                reasons.append(condition())
            except Exception as error:  # a stranger's code, or a system that is another than we know
                log.debug("a condition failed", exc_info=True)
                reasons.append(f"a condition failed: {type(error).__name__}: {error}")
        return next((reason for reason in reasons if reason), "")
