"""Counters that limit one peer: how often it calls, how much it holds open, and its refusals.

The time is an argument and never read here. Counts are kept by client, not by address: thousands
of honest clients may share one router. (Wrong tokens are counted by address, but a right token is
always accepted.) Memory does not grow with what a peer merely claims.
docs/reference/limits.md explains each limit.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from fairfleet.common.errors import LimitReached

REASONS = (
    "calls",
    "clients",
    "concurrent_calls",
    "downloads",
    "enrolments",
    "http_connections",
    "http_headers",
    "http_host",
    "http_slow",
    "http_viewers",
    "joins",
    "known_clients",
    "malformed",
    "other",
    "polls",
    "slow_reader",
    "slow_upload",
    "upload_bytes",
    "uploads",
    "watchers",
)
BUSY_SECONDS = 1.0  # a peer that holds too much at once may retry after this time


class Refusals:
    """The number of refused requests by reason. HTTP runs in threads, so a lock guards it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts = Counter(dict.fromkeys(REASONS, 0))

    def add(self, reason: str) -> None:
        """Count one refusal; an unknown reason counts as "other", so that labels stay few."""
        with self._lock:
            self._counts[reason if reason in REASONS else "other"] += 1

    def counts(self) -> dict[str, int]:
        """Return the count of every reason, including those that are zero."""
        with self._lock:
            return dict(self._counts)


@dataclass(slots=True)
class Bucket:
    """A token bucket, refilled at an even pace.

    It holds at most `burst` tokens; without a burst, those of a minute. `updated` is when `tokens`
    was last computed, in seconds.

    >>> bucket = Bucket(per_minute=2, tokens=2.0, updated=0.0)
    >>> bucket.take(0.0), bucket.take(0.0), bucket.take(0.0), bucket.take(30.0)
    (0.0, 0.0, 30.0, 0.0)
    """

    per_minute: int
    tokens: float
    updated: float
    burst: int | None = None

    def take(self, now: float) -> float:
        """Take a token and return 0; without one, return the seconds until there is one."""
        elapsed = max(0.0, now - self.updated)
        self.tokens = min(self.most, self.tokens + elapsed * self.per_minute / 60)
        self.updated = now
        if self.tokens < 1:
            return (1 - self.tokens) * 60 / self.per_minute
        self.tokens -= 1
        return 0.0

    def give_back(self) -> None:
        """Return a token to the bucket."""
        self.tokens = min(self.most, self.tokens + 1)

    @property
    def most(self) -> int:
        """The number of tokens that the bucket can hold: so many calls may come at once."""
        return self.per_minute if self.burst is None else min(self.burst, self.per_minute)


class Buckets:
    """One bucket per client, for at most `most` clients: the longest silent are forgotten first."""

    def __init__(
        self,
        per_minute: int,
        most: int,
        reason: str,
        what: str,
        kind: str = "client ",
        burst: int | None = None,
    ) -> None:
        """`reason` labels refusals; `kind` and `what` are the words of their message.

        `burst` is how many calls may come at once; None means a minute's worth.
        """
        self._per_minute, self._most, self._burst = per_minute, most, burst
        self._reason, self._what, self._kind = reason, what, kind
        self._by_client: OrderedDict[str, Bucket] = OrderedDict()

    def __len__(self) -> int:
        return len(self._by_client)

    def take(self, client: str, now: float) -> None:
        """Count a call; raise LimitReached, with the time to wait, if it is one too many."""
        bucket = self._by_client.pop(client, None) or self._full_bucket(now)
        self._by_client[client] = bucket  # the most recent caller comes last
        if len(self._by_client) > self._most:
            self._by_client.popitem(last=False)
        if wait := bucket.take(now):
            raise LimitReached(
                f"{self._kind}{client} {self._what} more than {self._describe_limit(bucket)}, "
                f"which is this server's limit; retry in {wait:.1f} s",
                reason=self._reason,
                retry_seconds=wait,
            )

    def _full_bucket(self, now: float) -> Bucket:
        bucket = Bucket(self._per_minute, 0.0, now, self._burst)
        bucket.tokens = bucket.most
        return bucket

    def _describe_limit(self, bucket: Bucket) -> str:
        words = f"{self._per_minute} times a minute"
        return (
            words if bucket.most == self._per_minute else f"{words}, or {bucket.most} times at once"
        )

    def give_back(self, client: str) -> None:
        """Uncount a call of a client, because it was useful."""
        if bucket := self._by_client.get(client):
            bucket.give_back()


class Places:
    """Limits how many transfers of one client are open at the same time."""

    def __init__(self, per_client: int, reason: str, what: str) -> None:
        self._per_client, self._reason, self._what = per_client, reason, what
        self._in_use: Counter[str] = Counter()

    @contextmanager
    def taken(self, client: str) -> Iterator[None]:
        """Hold a place of a client while the block runs."""
        self.take(client)
        try:
            yield
        finally:
            self.give_back(client)

    def take(self, client: str) -> None:
        """Take a place; raise LimitReached if the client holds as many as it may."""
        if self._in_use[client] >= self._per_client:
            raise LimitReached(
                f"client {client} has {self._per_client} {self._what} under way, which is this "
                "server's limit; wait until one has ended",
                reason=self._reason,
                retry_seconds=BUSY_SECONDS,
            )
        self._in_use[client] += 1

    def give_back(self, client: str) -> None:
        """Free a place of a client."""
        self._in_use[client] -= 1
        if not self._in_use[client]:
            del self._in_use[client]


class Calls:
    """Limits how many calls the server answers at the same time."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._under_way = 0

    @contextmanager
    def under_way(self) -> Iterator[None]:
        """Count a call while the block runs; raise LimitReached if there are too many."""
        if self._under_way >= self._limit:
            raise LimitReached(
                f"{self._limit} calls are under way, which is this server's limit; "
                "retry in a moment",
                reason="concurrent_calls",
                retry_seconds=BUSY_SECONDS,
            )
        self._under_way += 1
        try:
            yield
        finally:
            self._under_way -= 1


class KnownClients:
    """Names that ever took part. Each occupies memory and records, so their number is limited."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._names: set[str] = set()

    def __len__(self) -> int:
        return len(self._names)

    def recall(self, names: Iterable[str]) -> None:
        """Add the names of earlier runs of the server, even if they exceed the limit."""
        self._names.update(names)

    def add(self, name: str) -> None:
        """Add a name; raise LimitReached if it is new and the limit is reached."""
        if name in self._names:
            return
        if len(self._names) >= self._limit:
            raise LimitReached(
                f"{len(self._names)} clients are known, which is this server's limit, and {name} "
                "is not one of them. Raise limits.known_clients on the server, or use a name that "
                "is known.",
                reason="known_clients",
            )
        self._names.add(name)
