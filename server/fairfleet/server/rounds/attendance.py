"""When each client was last selected, and how many selections it missed since its last update.

The selection policy `least_recent` orders clients by this. Server and simulation use the same
functions: a selection counts as missed until the client delivers, or until its round turns out not
to need the client.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple


class Attendance(NamedTuple):
    """The attendance of one client."""

    last_selected: int | None = None  # a round
    missed: int = 0  # selections since the newest update, including a current one


class AttendanceBook:
    """The attendance of all clients."""

    def __init__(self, records: Mapping[str, Attendance] | None = None) -> None:
        self._of_client = dict(records or {})

    def of(self, client: str) -> Attendance:
        """Return the attendance of a client; a new client has no selections."""
        return self._of_client.get(client, Attendance())

    def select(self, clients: Iterable[str], round_number: int) -> None:
        """Record the selection for a round; a second one for the same round changes nothing."""
        for client in clients:
            record = self.of(client)
            if record.last_selected != round_number:
                self._of_client[client] = Attendance(round_number, record.missed + 1)

    def deliver(self, clients: Iterable[str]) -> None:
        """Record that updates of these clients count; earlier missed selections are forgotten."""
        for client in clients:
            self._of_client[client] = self.of(client)._replace(missed=0)

    def spare(self, clients: Iterable[str], round_number: int) -> None:
        """Record that a round had enough updates without these clients: they did not miss it."""
        for client in clients:
            record = self.of(client)
            if record.last_selected == round_number and record.missed:
                self._of_client[client] = record._replace(missed=record.missed - 1)

    def dump(self) -> dict[str, tuple[int | None, int]]:
        """Return all records as plain values, for a checkpoint."""
        return {
            client: (record.last_selected, record.missed)
            for client, record in self._of_client.items()
        }

    @classmethod
    def load(cls, dumped: Mapping[str, tuple[int | None, int]]) -> AttendanceBook:
        """Return the book that `dump` was called on."""
        return cls({client: Attendance(*record) for client, record in dumped.items()})
