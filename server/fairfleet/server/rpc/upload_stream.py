"""Receives the chunks of one upload and passes them on in batches.

Every switch to a worker thread costs time, so chunks are decoded a few at a time. A chunk that has
arrived is never lost: waiting chunks are passed on when the stream is silent, when it breaks off,
and when the client opens the upload again while this stream still seems to be alive.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

from fairfleet.common.chunk_stream import check_message_size
from fairfleet.common.errors import TooSlow
from fairfleet.server.transfer.upload import Upload

SILENCE_SECONDS = 0.1  # after which chunks that wait are passed on

Take = Callable[[list[bytes]], Awaitable[None]]
Keep = Callable[[asyncio.Future[None] | None, list[bytes]], None]


class UploadStream:
    """One stream of an upload.

    `take` decodes messages; `batch` returns how many may wait for it. When the stream breaks off,
    `keep` gets the messages that are being taken and those that wait.
    """

    def __init__(self, upload: Upload, take: Take, batch: Callable[[], int], keep: Keep) -> None:
        self._upload, self._take, self._batch, self._keep = upload, take, batch, keep
        self._waiting: list[bytes] = []
        self._taking: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._last_arrival = 0.0

    async def receive(self, stream: AsyncIterator[bytes]) -> list[bytes]:
        """Receive all messages; return the last ones, which the caller passes on itself."""
        try:
            async for message in stream:
                check_message_size(message)
                self._waiting.append(message)
                self._last_arrival = asyncio.get_running_loop().time()
                if self._timer is None:
                    self._watch_silence(SILENCE_SECONDS)
                if self._is_due():
                    await self._take_all_but_last()
            await self._settled()
        except (asyncio.CancelledError, TooSlow):
            self._keep(self._taking, self._waiting)
            self._waiting = []
            raise
        finally:
            if self._timer:
                self._timer.cancel()
        return self._waiting

    async def flush(self) -> None:
        """Pass on what has arrived; return when it is taken or refused."""
        for _ in range(2):  # what is being taken, then what arrived behind it
            self._take_waiting()
            if self._taking is not None:
                await asyncio.wait([self._taking])

    def _is_due(self) -> bool:
        complete = len(self._waiting) - 1
        return complete > 0 and (self._upload.takes_at_once or complete >= self._batch())

    async def _take_all_but_last(self) -> None:
        await self._settled()
        due, self._waiting = self._waiting[:-1], self._waiting[-1:]
        if not due:
            return  # a flush took them meanwhile
        if self._upload.takes_at_once:
            await self._take(due)
        else:
            self._begin(due)

    async def _settled(self) -> None:
        """Wait for the batch that is being taken, and raise its error."""
        if self._taking is not None:
            await asyncio.shield(self._taking)  # a cancelled stream must not cancel what it sent
            self._taking = None

    def _begin(self, messages: list[bytes]) -> None:
        self._taking = asyncio.ensure_future(self._take(messages))
        self._taking.add_done_callback(_retrieve_error)

    def _take_waiting(self) -> None:
        """Begin to take what waits, unless a batch is being taken or was refused."""
        taking = self._taking
        if taking is not None and (not taking.done() or taking.cancelled() or taking.exception()):
            return
        if self._waiting:
            messages, self._waiting = self._waiting, []
            self._begin(messages)

    def _watch_silence(self, seconds: float) -> None:
        self._timer = asyncio.get_running_loop().call_later(seconds, self._check_silence)

    def _check_silence(self) -> None:
        self._timer = None
        silent = asyncio.get_running_loop().time() - self._last_arrival
        if silent < SILENCE_SECONDS:
            self._watch_silence(SILENCE_SECONDS - silent)
        else:
            self._take_waiting()
            if self._waiting:  # a batch is still being taken
                self._watch_silence(SILENCE_SECONDS)


def _retrieve_error(taking: asyncio.Future[None]) -> None:
    """Prevent asyncio from logging an error that is reported to the client, or is not needed."""
    if not taking.cancelled():
        taking.exception()
