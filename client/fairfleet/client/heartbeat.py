"""The second thread of a client: while the task is at work it renews the lease, carries the live loss, and
hears whether to go on.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from fairfleet.client.link import Link, Stopped
from fairfleet.client.task import Abandoned, Progress
from fairfleet.common.errors import FleetError

log = logging.getLogger(__name__)

FIRST_SECONDS = 1.0  # the first beat comes soon: people like to see life


class Heartbeat:
    """One thread for the life of the client; it sleeps between tasks."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._task = ""
        self._changed = threading.Condition()
        self._latest = (0, 0, 0.0)
        self._verdict: Exception | None = None  # what the task is to be stopped with
        threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()

    @contextmanager
    def during(self, task: str) -> Iterator[Progress]:
        """Beats as long as the block runs; the task calls what this gives, which raises when it is to stop."""
        self._latest, self._verdict = (0, 0, 0.0), None
        with self._changed:
            self._task = task
            self._changed.notify()
        try:
            yield self._progress
        finally:
            self._task = ""  # the thread need not hear of it at once: it looks before it beats

    def _progress(self, done: int, planned: int, loss: float) -> None:
        self._latest = (done, planned, loss)
        if self._link.stopped:
            raise Abandoned
        if self._verdict is not None:
            raise self._verdict

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
            pause = self._link.joined.heartbeat_seconds

    def _send(self, task: str) -> None:
        done, planned, loss = self._latest
        try:
            answer = self._link.heartbeat(task=task, steps_done=done, steps_planned=planned, loss=loss)
            verdict: Exception | None = Abandoned() if answer.abandon else None
        except Stopped:
            verdict = Abandoned()
        except FleetError as error:
            verdict = error
        except Exception:  # this thread must outlive whatever one beat meets
            log.exception("a heartbeat failed")
            return
        if self._task == task:
            self._verdict = verdict
