"""The tasks of clients, and the calls that wait for one. In memory only.

A client that waits for a task is woken by a future of its own, so a round that selects ten of ten
thousand clients wakes ten.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from fairfleet.server.federation.clients.sessions import Session, Sessions

# How long NextTask waits: below the 30 s of the contract, and of most proxies.
POLL_SECONDS = 25.0

# Task ids come back from clients, so the numbers in them are bounded.
TRAINING = re.compile(r"train/([0-9]{1,18})/")
TASK = re.compile(r"(?:train|verify|evaluate)/[0-9]{1,18}/[0-9]{1,18}/(.{1,64})")
Kind = Literal["train", "verify", "evaluate"]


@dataclass(frozen=True)
class Assignment:
    """A client's task."""

    id: str
    kind: Kind
    version: int
    ends: float  # in the event loop's time


def round_trained(task: str) -> int | None:
    """Return the round that the task with this id trains; None if it is of another kind.

    >>> round_trained("train/7/0/device"), round_trained("evaluate/7/0/device")
    (7, None)
    """
    match = TRAINING.match(task)
    return int(match[1]) if match else None


def is_task_of(client: str, task: str) -> bool:
    """Return whether the client may have been given this task, by any run of the server.

    >>> [is_task_of("device", task) for task in ("train/7/0/device", "train/7/0/other", "x")]
    [True, False, False]
    """
    match = TASK.fullmatch(task)
    return match is not None and match[1] == client


class Assignments:
    """Holds at most one task per client, and wakes clients that wait for one."""

    def __init__(self, sessions: Sessions) -> None:
        self.sessions = sessions
        self._assignments: dict[str, Assignment] = {}
        self._waiting: dict[str, asyncio.Future[None]] = {}
        self._for_models: set[str] = set()  # waiting clients that accept a model before its task

    def assignment(self, client: str) -> Assignment | None:
        """Return the client's task, or None."""
        return self._assignments.get(client)

    def activity(self, client: str) -> str:
        """Return the kind of the client's task, or "" if it has none."""
        assignment = self._assignments.get(client)
        return assignment.kind if assignment else ""

    def holds(self, client: str, task: str) -> bool:
        """Return whether this is still the client's task."""
        assignment = self._assignments.get(client)
        return assignment is not None and assignment.id == task

    def assign(
        self, kind: Kind, version: int, attempt: int, clients: Iterable[str], ends: float
    ) -> None:
        """Give clients a task that `ends` in the event loop's time, and wake them."""
        for client in clients:
            self._assignments[client] = Assignment(
                f"{kind}/{version}/{attempt}/{client}", kind, version, ends
            )
            self.wake(client)

    def release(self, clients: Iterable[str]) -> None:
        """Remove the tasks of these clients."""
        for client in clients:
            self._assignments.pop(client, None)

    def release_all(self) -> None:
        """Remove all tasks, and let all waiting calls return."""
        self._assignments.clear()
        self.wake_all()

    async def wait(self, session: Session, *, for_models: bool = False) -> None:
        """Return when the client is woken, at the latest after POLL_SECONDS.

        The lease does not run meanwhile. An older call of the same client returns now.
        """
        self.wake(session.client)
        woken = self._waiting[session.client] = asyncio.get_running_loop().create_future()
        if for_models:
            self._for_models.add(session.client)
        session.polls += 1
        try:
            await asyncio.wait([woken], timeout=POLL_SECONDS)
        finally:
            session.polls -= 1
            session.last_seen = asyncio.get_running_loop().time()
            if self._waiting.get(session.client) is woken:
                self.wake(session.client)

    def wake_for_models(self, clients: frozenset[str]) -> None:
        """Wake those of the clients that accept a model before its task."""
        for client in self._for_models & clients:
            self.wake(client)

    def wake(self, client: str) -> None:
        """Let the client's waiting call return."""
        self._for_models.discard(client)
        woken = self._waiting.pop(client, None)
        if woken is not None and not woken.done():
            woken.set_result(None)

    def wake_all(self) -> None:
        """Let all waiting calls return."""
        for client in list(self._waiting):
            self.wake(client)
