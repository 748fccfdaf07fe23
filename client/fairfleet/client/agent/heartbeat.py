"""The second thread of a client: it sends heartbeats while the task is at work.

A heartbeat renews the client's lease and carries the current loss. Its answer says whether the
task should go on.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from fairfleet.client.agent.fleet_session import Stopped
from fairfleet.client.agent.server_connection import ServerConnection
from fairfleet.client.task import Abandoned, Progress
from fairfleet.common.errors import FleetError

log = logging.getLogger(__name__)

FIRST_SECONDS = 1.0  # the first heartbeat is early, so that people see progress


class Heartbeat:
    """One thread for the lifetime of the client; it sleeps between tasks."""

    def __init__(self, connection: ServerConnection) -> None:
        self._connection = connection
        self._task = ""
        self._changed = threading.Condition()
        self._latest = (0, 0, 0.0)
        self._stop_with: Exception | None = None  # raised in the task to end it
        threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()

    @contextmanager
    def during(self, task: str) -> Iterator[Progress]:
        """Send heartbeats while the block runs.

        Provides the function that the task calls after each step. It raises when the task must
        stop.
        """
        self._latest, self._stop_with = (0, 0, 0.0), None
        with self._changed:
            self._task = task
            self._changed.notify()
        try:
            yield self._progress
        finally:
            self._task = ""  # no need to notify the thread: it checks before each heartbeat

    def _progress(self, done: int, planned: int, loss: float) -> None:
        self._latest = (done, planned, loss)
        if self._connection.stopped:
            raise Abandoned
        if self._stop_with is not None:
            raise self._stop_with

    def _beat(self) -> None:
        pause = FIRST_SECONDS
        while True:
            with self._changed:
                task = self._task
                self._changed.wait(pause if task else None)
                if not task or self._task != task:
                    pause = FIRST_SECONDS
                    continue
            self._send(task)
            pause = self._connection.joined.heartbeat_seconds

    def _send(self, task: str) -> None:
        done, planned, loss = self._latest
        stop_with: Exception | None = None
        try:
            answer = self._connection.heartbeat(
                task=task, steps_done=done, steps_planned=planned, loss=loss
            )
            stop_with = Abandoned() if answer.abandon else None
        except Stopped:
            stop_with = Abandoned()
        except FleetError as error:
            stop_with = error
        except Exception:  # this thread must survive every failure of one heartbeat
            log.exception("a heartbeat failed")
            return
        if self._task == task:
            self._stop_with = stop_with
