"""What one peer may take of the server: how often it may call, how much it may hold, and how refusals are counted.

Time is given, never read. Everything here is kept by client, not by address: thousands of honest clients may stand
behind one router. (Wrong tokens are, but a right one is heard all the same.) Nothing grows with what a peer merely
claims. docs/limits.md says what each limit is for.
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
BUSY_SECONDS = 1.0  # after which whoever holds too much at once may try again


class Refusals:
    """How often peers were turned away, by reason. HTTP is spoken in threads, so this has a lock."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts = Counter(dict.fromkeys(REASONS, 0))

    def add(self, reason: str) -> None:
        with self._lock:
            self._counts[reason if reason in REASONS else "other"] += 1

    def counts(self) -> dict[str, int]:
        with self._lock:
            return dict(self._counts)


@dataclass(slots=True)
class Bucket:
    """Tokens that come back at an even pace, a minute's worth at most.

    >>> bucket = Bucket(per_minute=2, tokens=2.0, at=0.0)
    >>> bucket.take(0.0), bucket.take(0.0), bucket.take(0.0), bucket.take(30.0)
    (0.0, 0.0, 30.0, 0.0)
    """

    per_minute: int
    tokens: float
    at: float

    def take(self, now: float) -> float:
        """Takes a token and returns 0; or, if there is none, takes nothing and returns in how many seconds one is."""
        self.tokens = min(self.per_minute, self.tokens + max(0.0, now - self.at) * self.per_minute / 60)
        self.at = now
        if self.tokens < 1:
            return (1 - self.tokens) * 60 / self.per_minute
        self.tokens -= 1
        return 0.0

    def give_back(self) -> None:
        self.tokens = min(self.per_minute, self.tokens + 1)


class Buckets:
    """One for each client that called lately; of the others, the ones silent for longest are forgotten first."""

    def __init__(self, per_minute: int, most: int, reason: str, what: str, kind: str = "client ") -> None:
        self._per_minute, self._most = per_minute, most
        self._reason, self._what, self._kind = reason, what, kind
        self._by_client: OrderedDict[str, Bucket] = OrderedDict()

    def __len__(self) -> int:
        return len(self._by_client)

    def take(self, client: str, now: float) -> None:
        bucket = self._by_client.pop(client, None) or Bucket(self._per_minute, self._per_minute, now)
        self._by_client[client] = bucket  # the newest is the last
        if len(self._by_client) > self._most:
            self._by_client.popitem(last=False)
        if wait := bucket.take(now):
            raise LimitReached(
                f"{self._kind}{client} {self._what} more than {self._per_minute} times a minute, which is this "
                f"server's limit; come back in {wait:.1f} s",
                reason=self._reason,
                retry_seconds=wait,
            )

    def give_back(self, client: str) -> None:
        """The call was worth it: it does not count."""
        if bucket := self._by_client.get(client):
            bucket.give_back()


class Places:
    """So many at the same time, by client."""

    def __init__(self, per_client: int, reason: str, what: str) -> None:
        self._per_client, self._reason, self._what = per_client, reason, what
        self._taken: Counter[str] = Counter()

    @contextmanager
    def taken(self, client: str) -> Iterator[None]:
        self.take(client)
        try:
            yield
        finally:
            self.give_back(client)

    def take(self, client: str) -> None:
        if self._taken[client] >= self._per_client:
            raise LimitReached(
                f"client {client} has {self._per_client} {self._what} under way, which is this server's limit; "
                "wait until one has ended",
                reason=self._reason,
                retry_seconds=BUSY_SECONDS,
            )
        self._taken[client] += 1

    def give_back(self, client: str) -> None:
        self._taken[client] -= 1
        if not self._taken[client]:
            del self._taken[client]


class Calls:
    """How many calls are answered at the same time, in all."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._under_way = 0

    @contextmanager
    def under_way(self) -> Iterator[None]:
        if self._under_way >= self._limit:
            raise LimitReached(
                f"{self._limit} calls are under way, which is this server's limit; try again in a moment",
                reason="concurrent_calls",
                retry_seconds=BUSY_SECONDS,
            )
        self._under_way += 1
        try:
            yield
        finally:
            self._under_way -= 1


class KnownClients:
    """Names that ever took part: each leaves something in memory and in the records, so there is an end to them."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._names: set[str] = set()

    def __len__(self) -> int:
        return len(self._names)

    def recall(self, names: Iterable[str]) -> None:
        """Of earlier runs of the server: they stay known, however many they are."""
        self._names.update(names)

    def add(self, name: str) -> None:
        if name in self._names:
            return
        if len(self._names) >= self._limit:
            raise LimitReached(
                f"{len(self._names)} clients are known, which is this server's limit, and {name} is not one of them. "
                "Set limits.known_clients higher at the server, or use a name that is known.",
                reason="known_clients",
            )
        self._names.add(name)
