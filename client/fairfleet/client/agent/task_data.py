"""Keeps the task's data fresh, and tells the server how many samples there are.

Only tasks with `refresh` can change their data. A client that has no training data yet stays
connected, and takes part once there are some.
"""

from __future__ import annotations

import logging
import time

from fairfleet.client.agent.server_connection import ServerConnection
from fairfleet.client.task import Refreshing, Task
from fairfleet.common.errors import UsageError
from fairfleet.common.features import COUNTS

log = logging.getLogger(__name__)


class DataMissing(Exception):
    """Raised when a training is requested while the task has no training data."""


class TaskData:
    """The data of one task, looked for anew at intervals."""

    def __init__(self, task: Task, connection: ServerConnection, every_seconds: float) -> None:
        self._task, self._connection, self._every = task, connection, every_seconds
        # A task with data has just been made, so its data are new.
        self._next = time.monotonic() + (every_seconds if task.train_samples else 0.0)
        self._failure = ""  # that was logged last

    @property
    def is_missing(self) -> bool:
        """Whether there are no training data."""
        return not self._task.train_samples

    def refresh(self) -> None:
        """Let the task look for new data. Raises whatever the task raises."""
        if isinstance(self._task, Refreshing):
            self._next = time.monotonic() + self._every
            before = self._task.train_samples
            self._task.refresh()
            if before != self._task.train_samples:
                log.info("%d training samples now, %d before", self._task.train_samples, before)
            samples = self._task.train_samples, self._task.test_samples
            self._connection.counts.set(*samples, self._connection.joined)

    def refresh_for_training(self) -> None:
        """Look for new data. Raises DataMissing if there are no training data.

        If looking fails, the data of the last time serve: a disk may be away for a while.
        """
        self._try_refresh()
        if self.is_missing:
            raise DataMissing("there are no training data at present")

    def refresh_if_due(self) -> None:
        """Look for new data unless that was done a short while ago."""
        if time.monotonic() >= self._next:
            self._try_refresh()

    def _try_refresh(self) -> None:
        """Look for new data. An error is logged once, and the task keeps the data that it has."""
        try:
            self.refresh()
            self._failure = ""
        except Exception as error:  # the task is a user's code and may raise anything
            if str(error) != self._failure:
                log.warning("looking for new data failed", exc_info=error)
            self._failure = str(error)

    def wait(self, seconds: float) -> None:
        """Wait, but not longer than until the first training data arrive."""
        ends = time.monotonic() + seconds
        if not self.is_missing or not isinstance(self._task, Refreshing):
            self._connection.wait(seconds)
            return
        while self.is_missing and (left := ends - time.monotonic()) > 0:
            self._connection.wait(min(left, self._every))
            self.refresh_if_due()

    def stay_away_while_missing(self) -> None:
        """Stay disconnected from a server that would not wait for the first training data.

        A server without the feature `counts` selects every client, whether it has data or not.
        Raises UsageError if there are no data, and none can arrive.
        """
        if not self.is_missing:
            return
        if not isinstance(self._task, Refreshing):
            raise UsageError(
                "the task has no training data (train_samples is 0), and no method refresh() that "
                "could find some later. Give it data, or add the method."
            )
        if COUNTS in self._connection.joined.features:
            return
        log.info("no training data yet: staying disconnected from this older server until then")
        self._connection.disconnect("no training data yet")
        while self.is_missing:
            self._connection.wait(self._every)
            self.refresh_if_due()
        self._connection.reconnect()
