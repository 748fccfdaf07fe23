"""The limits of one server's settings, as objects that the RPC services consult.

`RequestLimits` holds one counter per limit; `WrongTokenLimiter` limits wrong enrolment tokens by
address and in total. Everything here runs on the event loop.
"""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TypeVar
from urllib.parse import unquote

from fairfleet.common.codecs import CHUNK_BYTES
from fairfleet.common.errors import TooSlow
from fairfleet.server.security.limits import ServerLimits
from fairfleet.server.security.rate_limits import Buckets, Calls, KnownClients, Places, Refusals

T = TypeVar("T")

# Chunks of an upload are decoded in batches, because every hand-over to a thread has a cost:
# all chunks of a small upload together, those of a larger upload two at a time.
SMALL_UPLOAD_CHUNKS, LARGE_UPLOAD_BATCH = 4, 2
# Chunks that may wait for decoding in all uploads together, besides those being decoded.
WAITING_CHUNKS = 64
MOST_ADDRESSES = 10_000  # remembered; a peer with more addresses meets the limit on the total
IPV6_NETWORK = 64  # bits: what one household or machine is assigned


class RequestLimits:
    """All limits of one server that depend on what its peers do."""

    def __init__(self, limits: ServerLimits) -> None:
        self.limits = limits
        self.refusals = Refusals()
        self.known = KnownClients(limits.known_clients)
        self.joins = _buckets(
            limits, limits.joins_per_minute, "joins", "joined", burst=limits.joins_at_once
        )
        self.polls = _buckets(limits, limits.polls_per_minute, "polls", "polled without a new task")
        self.calls = _buckets(limits, limits.calls_per_minute, "calls", "called")
        self.certificates = _buckets(
            limits, limits.enrolments_per_minute, "enrolments", "requested a certificate", kind=""
        )
        self.wrong_tokens = WrongTokenLimiter(
            limits.enrolments_per_minute, limits.wrong_tokens_per_minute
        )
        self.under_way = Calls(limits.most_calls)
        self.downloads = Places(limits.downloads_per_client, "downloads", "downloads")
        self._uploads = Places(limits.uploads_per_client, "uploads", "uploads")
        self._upload_places = asyncio.Semaphore(limits.uploads)
        self._uploading = 0  # uploads that hold a place

    @asynccontextmanager
    async def upload(self, client: str) -> AsyncIterator[None]:
        """Hold a place among the running uploads, waiting for one if all are in use.

        Waiting instead of refusing loses nothing: the update is trained already.
        """
        with self._uploads.taken(client):
            async with self._upload_places:
                self._uploading += 1
                try:
                    yield
                finally:
                    self._uploading -= 1

    def batch(self, size_bytes: int) -> int:
        """Return how many chunks an upload of this size may gather before they are decoded.

        The more uploads run, the fewer chunks each may hold in memory.
        """
        is_small = size_bytes <= SMALL_UPLOAD_CHUNKS * CHUNK_BYTES
        chunks = SMALL_UPLOAD_CHUNKS if is_small else LARGE_UPLOAD_BATCH
        return max(1, min(chunks, WAITING_CHUNKS // max(1, self._uploading)))

    async def paced(self, stream: AsyncIterator[T], size_bytes: int) -> AsyncIterator[T]:
        """Yield the messages of an upload of this size; raise TooSlow if they come too slowly.

        The slowest accepted connection needs `idle_seconds` for a chunk. A stream that sends a
        byte now and then therefore holds its place no longer than such a connection would.
        """
        loop, seconds = asyncio.get_running_loop(), self.limits.idle_seconds
        ends = loop.time() + seconds * (2 + size_bytes // CHUNK_BYTES)
        messages = aiter(stream)
        while True:
            try:
                async with asyncio.timeout_at(min(ends, loop.time() + seconds)):
                    message = await anext(messages)
            except StopAsyncIteration:
                return
            except TimeoutError:
                raise TooSlow(
                    f"too little came within {seconds:g} s, this server's limits.idle_seconds; "
                    "open the upload again to send the rest",
                    reason="slow_upload",
                ) from None
            yield message


def _buckets(
    limits: ServerLimits,
    per_minute: int,
    reason: str,
    what: str,
    kind: str = "client ",
    burst: int | None = None,
) -> Buckets:
    return Buckets(per_minute, limits.known_clients, reason, what, kind, burst)


class WrongTokenLimiter:
    """Limits how many wrong enrolment tokens are examined, by address and in total.

    A token cannot be guessed, but every wrong one costs a line in the log, and any peer that
    reaches the port could send them endlessly. A right token never counts, so an honest device
    behind the same router as such a peer is not refused.
    """

    def __init__(self, per_minute: int, in_all: int) -> None:
        """`per_minute` limits one address, `in_all` all addresses together."""
        self._by_address = Buckets(
            per_minute, MOST_ADDRESSES, "enrolments", "sent wrong tokens", kind=""
        )
        self._total = Buckets(in_all, 1, "enrolments", "sent wrong tokens", kind="")

    def sent_wrong_token(self, peer: str, now: float) -> None:
        """Count a wrong token; raise LimitReached if there were too many lately."""
        self._by_address.take(address_of(peer), now)
        self._total.take("all addresses together", now)


def address_of(peer: str) -> str:
    """Return the address by which a peer, as gRPC names it, is counted.

    >>> address_of("ipv4:192.0.2.7:51234"), address_of("unix:")
    ('192.0.2.7', 'unix')
    >>> address_of("ipv6:%5B2001:db8:1:2::7%5D:443")
    '2001:db8:1:2::/64'
    """
    kind, _, rest = unquote(peer).partition(":")
    host = rest.rpartition(":")[0].strip("[]").partition("%")[0]
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return kind[:16]
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    if address.ipv4_mapped:
        return str(address.ipv4_mapped)
    return str(ipaddress.ip_network((address, IPV6_NETWORK), strict=False))
