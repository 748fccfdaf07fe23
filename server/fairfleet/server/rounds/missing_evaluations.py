"""Names the clients that give no result in an evaluation, with the reason that is recorded.

A client that cannot evaluate is recorded as such, never as an accuracy of zero.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from fairfleet.server.rounds import state_machine
from fairfleet.server.rounds.state_machine import Event, Phase, Round

GONE = "it was gone"
SILENT = "it did not answer in time"
NO_TEST_DATA = "it has no test data"  # recorded without a request


class MissingEvaluation(NamedTuple):
    """A client that gives no result for a version, and why."""

    version: int
    client: str
    reason: str


def missing_evaluations(
    facts: Iterable[tuple[Round, Event, Round]], unable: Callable[[], Iterable[tuple[str, str]]]
) -> Iterator[MissingEvaluation]:
    """Return the clients that will give no result, according to these events.

    `unable` is called when an evaluation begins: it returns the connected clients that cannot be
    selected for it, each with the reason.
    """
    for before, event, after in facts:
        if before.phase is Phase.EVALUATING:
            for client, reason in _without_result(before, event, after, unable):
                yield MissingEvaluation(before.number, client, reason)


def _without_result(
    before: Round, event: Event, after: Round, unable: Callable[[], Iterable[tuple[str, str]]]
) -> list[tuple[str, str]]:
    match event:
        case state_machine.ClientsChosen():
            return list(unable())
        case state_machine.ClientLost(client) | state_machine.ClientRevoked(client) if (
            client in before.asked
        ):
            return [(client, GONE)]
        case state_machine.DeadlinePassed():
            return [(client, SILENT) for client in sorted(before.asked - after.asked)]
    return []
