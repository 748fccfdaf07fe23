"""The update streams of each client: those being received, and writes that outlive their stream.

A client that opens an upload again must learn an offset that includes everything its earlier
streams delivered. `settle` waits for that.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine, Iterator
from typing import Any, Protocol


class Flushable(Protocol):
    """A stream whose received chunks may still wait to be decoded."""

    async def flush(self) -> None:
        """Return when everything received was decoded or refused."""


class ClientStreams:
    """Tracks streams and writes by client."""

    def __init__(self) -> None:
        self._live: dict[str, set[Flushable]] = {}
        self._writing: dict[str, set[asyncio.Future[None]]] = {}

    @contextlib.contextmanager
    def live(self, client: str, stream: Flushable) -> Iterator[None]:
        """Let `settle` flush a stream while it is received."""
        streams = self._live.setdefault(client, set())
        streams.add(stream)
        try:
            yield
        finally:
            streams.discard(stream)
            if not streams:
                self._live.pop(client, None)

    def outlive(self, client: str, work: Coroutine[Any, Any, None]) -> asyncio.Future[None]:
        """Start a write that continues when its stream is cancelled."""
        task = asyncio.ensure_future(work)
        self._writing.setdefault(client, set()).add(task)

        def ended(task: asyncio.Future[None]) -> None:
            writing = self._writing[client]
            writing.discard(task)
            if not writing:
                del self._writing[client]
            if not task.cancelled():
                # The client learns of an error when it opens the upload again.
                task.exception()

        task.add_done_callback(ended)
        return task

    async def settle(self, client: str) -> None:
        """Wait until everything received from the client is decoded or refused."""
        if writing := self._writing.get(client):
            await asyncio.wait(tuple(writing))
        for stream in tuple(self._live.get(client, ())):
            await stream.flush()
