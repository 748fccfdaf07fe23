"""Who is connected and what each was asked to do. In memory only; a client that waits for a task is woken by its
own future, so a round that asks ten of ten thousand wakes ten.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from fairfleet.server.sessions import Session, Sessions

POLL_SECONDS = 25.0  # how long NextTask is held: below the 30 s of the contract, and of most proxies

TRAINING = re.compile(r"train/([0-9]{1,18})/")  # it comes back from a client: whatever else it is, it is short
Kind = Literal["train", "verify", "evaluate"]


@dataclass(frozen=True)
class Assignment:
    id: str
    kind: Kind
    version: int
    ends: float  # in the event loop's time


def round_trained(task: str) -> int | None:
    """For which round this task trains, by its id; None if it is of another kind.

    >>> round_trained("train/7/0/device"), round_trained("evaluate/7/0/device")
    (7, None)
    """
    found = TRAINING.match(task)
    return int(found[1]) if found else None


class Roster:
    def __init__(self, sessions: Sessions) -> None:
        self.sessions = sessions
        self._assignments: dict[str, Assignment] = {}
        self._waiting: dict[str, asyncio.Future[None]] = {}
        self._for_models: set[str] = set()  # those of them that also take a model

    def assignment(self, client: str) -> Assignment | None:
        return self._assignments.get(client)

    def holds(self, client: str, task: str) -> bool:
        """Whether this task is (still) this client's."""
        assignment = self._assignments.get(client)
        return assignment is not None and assignment.id == task

    def assign(self, kind: Kind, version: int, attempt: int, clients: Iterable[str], ends: float) -> None:
        for client in clients:
            self._assignments[client] = Assignment(f"{kind}/{version}/{attempt}/{client}", kind, version, ends)
            self.wake(client)

    def release(self, clients: Iterable[str]) -> None:
        for client in clients:
            self._assignments.pop(client, None)

    def release_all(self) -> None:
        self._assignments.clear()
        self.wake_all()

    async def wait(self, session: Session, *, for_models: bool = False) -> None:
        """Until there is news for this client, or a poll was held long enough. The lease does not run meanwhile."""
        self.wake(session.client)  # an older poll of the same client was given up by it
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
        """Those of them that take a model before their task."""
        for client in self._for_models & clients:
            self.wake(client)

    def wake(self, client: str) -> None:
        self._for_models.discard(client)
        woken = self._waiting.pop(client, None)
        if woken is not None and not woken.done():
            woken.set_result(None)

    def wake_all(self) -> None:
        for client in list(self._waiting):
            self.wake(client)
