"""Events to everyone who watches. A watcher that is too slow is cut off: it never slows the server."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

from fairfleet.common.errors import LimitReached
from fairfleet.proto.v1.operator_pb2 import Event

BACKLOG = 10_000


class Broadcast:
    def __init__(self) -> None:
        self._sequence = 0
        self._watchers: set[asyncio.Queue[Event | None]] = set()

    def emit(self, round_number: int, **kind: Any) -> None:
        self._sequence += 1
        event = Event(sequence=self._sequence, unix_seconds=time.time(), round=round_number, **kind)
        for queue in list(self._watchers):
            if queue.qsize() >= BACKLOG:
                self._watchers.discard(queue)  # the watcher finds its end when it has read the backlog
            else:
                queue.put_nowait(event)

    def close(self) -> None:
        for queue in self._watchers:
            queue.put_nowait(None)
        self._watchers.clear()

    def watch(self) -> AsyncIterator[Event]:
        """Everything emitted from this call on."""
        queue: asyncio.Queue[Event | None] = asyncio.Queue()
        self._watchers.add(queue)
        return self._read(queue)

    async def _read(self, queue: asyncio.Queue[Event | None]) -> AsyncIterator[Event]:
        try:
            while queue in self._watchers or not queue.empty():
                event = await queue.get()
                if event is None:
                    return
                yield event
            raise LimitReached(
                f"this watcher fell {BACKLOG} events behind and was cut off; watch again", reason="watchers"
            )
        finally:
            self._watchers.discard(queue)
