"""What an evaluation leaves in the records beside its results: who gave none, and why.

A client that cannot evaluate is recorded as such, never as an accuracy of zero.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from fairfleet.server import rounds
from fairfleet.server.rounds import Event, Phase, Round
from fairfleet.server.sessions import Sessions

NO_TEST_DATA = "it has no test data"
GONE = "it was gone"
SILENT = "it did not answer in time"


class Unanswered(NamedTuple):
    version: int
    client: str
    why: str


def unanswered(facts: Iterable[tuple[Round, Event, Round]], sessions: Sessions) -> Iterator[Unanswered]:
    """Those of whom these events say that no evaluation of theirs will come."""
    for before, event, after in facts:
        if before.phase is Phase.EVALUATING:
            for client, why in _without_result(before, event, after, sessions):
                yield Unanswered(before.number, client, why)


def _without_result(before: Round, event: Event, after: Round, sessions: Sessions) -> list[tuple[str, str]]:
    match event:
        case rounds.ClientsChosen():
            return [(session.client, NO_TEST_DATA) for session in sessions.all() if not session.member.test_samples]
        case rounds.ClientLost(client) | rounds.ClientRevoked(client) if client in before.asked:
            return [(client, GONE)]
        case rounds.DeadlinePassed():
            return [(client, SILENT) for client in sorted(before.asked - after.asked)]
    return []
