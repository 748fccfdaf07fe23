"""The limits of one server, as its settings have them, in the places where peers meet them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TypeVar

from fairfleet.common.codecs import CHUNK_BYTES
from fairfleet.common.errors import TooSlow
from fairfleet.server.limits import Buckets, Calls, KnownClients, Places, Refusals
from fairfleet.server.settings import Limits
from fairfleet.server.strangers import Strangers

T = TypeVar("T")

# Chunks of an upload that are decoded together, because every way to a thread costs: of a small one all, of others two.
WHOLE, SOME = 4, 2
WAITING = 64  # chunks that all uploads together may hold for it, beside those that are being decoded


class Gate:
    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.refusals = Refusals()
        self.known = KnownClients(limits.known_clients)
        self.joins = Buckets(limits.joins_per_minute, limits.known_clients, "joins", "joined")
        self.polls = Buckets(limits.polls_per_minute, limits.known_clients, "polls", "asked for a task in vain")
        self.calls = Buckets(limits.calls_per_minute, limits.known_clients, "calls", "called")
        self.certificates = Buckets(
            limits.enrolments_per_minute, limits.known_clients, "enrolments", "asked for a certificate", kind=""
        )
        self.strangers = Strangers(limits.enrolments_per_minute, limits.wrong_tokens_per_minute)
        self.under_way = Calls(limits.most_calls)
        self.downloads = Places(limits.downloads_per_client, "downloads", "downloads")
        self._uploads = Places(limits.uploads_per_client, "uploads", "uploads")
        self._upload_places = asyncio.Semaphore(limits.uploads)
        self._uploading = 0  # so many hold a place

    @asynccontextmanager
    async def upload(self, client: str) -> AsyncIterator[None]:
        """A place among those that send. Who finds all taken waits: its update is trained, it need only be patient."""
        with self._uploads.taken(client):
            async with self._upload_places:
                self._uploading += 1
                try:
                    yield
                finally:
                    self._uploading -= 1

    def batch(self, size_bytes: int) -> int:
        """Chunks that an upload of this size may gather now, before they are decoded: fewer where many send."""
        wanted = WHOLE if size_bytes <= WHOLE * CHUNK_BYTES else SOME
        return max(1, min(wanted, WAITING // max(1, self._uploading)))

    async def paced(self, stream: AsyncIterator[T], size_bytes: int) -> AsyncIterator[T]:
        """The messages of an upload of so many bytes, as long as they come at all.

        The slowest link is one that needs `idle_seconds` for a chunk. So a stream that sends a byte now and then
        holds its place no longer than one that sends all over such a link.
        """
        seconds = self.limits.idle_seconds
        ends = asyncio.get_running_loop().time() + seconds * (2 + size_bytes // CHUNK_BYTES)
        messages = aiter(stream)
        while True:
            try:
                async with asyncio.timeout_at(min(ends, asyncio.get_running_loop().time() + seconds)):
                    message = await anext(messages)
            except StopAsyncIteration:
                return
            except TimeoutError:
                raise TooSlow(
                    f"too little came within {seconds:g} s, this server's limits.idle_seconds; open the upload again "
                    "to send the rest",
                    reason="slow_upload",
                ) from None
            yield message
