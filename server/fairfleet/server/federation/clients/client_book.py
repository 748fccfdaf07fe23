"""The software and features of every client that ever joined, also while it is disconnected.

A join waits for no disk: changed descriptions are written in the background, as many as there are
in one transaction. A crash can lose the newest ones; their clients then join again anyway.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable

from fairfleet.server.federation.background import BackgroundTasks, Executors
from fairfleet.server.federation.clients.sessions import ClientDescription
from fairfleet.server.storage.client_queries import (
    ClientSoftware,
    client_software,
    client_software_write,
)
from fairfleet.server.storage.store import Store

log = logging.getLogger(__name__)


class ClientBook:
    """Remembers what each client said of its software when it last joined."""

    def __init__(
        self, store: Store, background: BackgroundTasks, executors: Executors, limit: int
    ) -> None:
        """At most `limit` clients are remembered: without TLS anybody can join under any name."""
        self._store, self._background, self._executors = store, background, executors
        self._limit = limit
        self._known: dict[str, ClientSoftware] = {}
        self._unwritten: dict[str, ClientSoftware] = {}
        self._is_writing = self._is_full = False

    async def open(self) -> None:
        """Load what earlier runs of the server wrote."""
        self._known = await self._executors.in_database(client_software, self._store)

    def clients(self) -> Iterable[str]:
        """Return the names of all remembered clients."""
        return self._known.keys()

    def software_of(self, client: str) -> ClientSoftware:
        """Return what a client said when it last joined; empty if it said nothing."""
        return self._known.get(client, ClientSoftware())

    def note(self, member: ClientDescription) -> None:
        """Remember the software of a client that joins, and write it if it has changed."""
        said = ClientSoftware(member.software, tuple(sorted(member.features)))
        if self._known.get(member.client) == said or not self._has_place(member.client):
            return
        self._known[member.client] = self._unwritten[member.client] = said
        if not self._is_writing:
            self._is_writing = True
            self._background.spawn(self._write())

    def _has_place(self, client: str) -> bool:
        if client in self._known or len(self._known) < self._limit:
            return True
        if not self._is_full:
            self._is_full = True
            log.warning("the software of clients beyond %d is not recorded", self._limit)
        return False

    async def _write(self) -> None:
        try:
            while self._unwritten:
                batch, self._unwritten = self._unwritten, {}
                write = client_software_write(batch, time.time())
                await self._background.run_to_completion(
                    self._executors.in_database(self._store.write, write)
                )
        finally:
            self._is_writing = False
