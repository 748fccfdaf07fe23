"""Read what was recorded, so that a restart leaves no gap in what is shown.

Rounds that were undone are left out, and evaluations of the versions that they committed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from fairfleet.server.monitoring.measures import (
    REMEMBERED_ROUNDS,
    Comparison,
    Evaluations,
    FleetEvaluation,
)
from fairfleet.server.rounds.state_machine import Phase, Round
from fairfleet.server.storage.client_queries import last_heard, times_asked, update_counts
from fairfleet.server.storage.evaluation_queries import (
    evaluated_unix,
    evaluated_versions,
    evaluation_failures,
    evaluations_of,
)
from fairfleet.server.storage.operations.undone_rounds import undone_rounds
from fairfleet.server.storage.round_record import RoundRecord
from fairfleet.server.storage.server_evaluation_table import (
    ServerEvaluation,
    recorded_server_evaluations,
)
from fairfleet.server.storage.store import Store

MAX_EVALUATIONS = 200  # evenly spread over a federation that has more


@dataclass(frozen=True)
class RecordedHistory:
    """What the database holds of earlier runs, as far as it is shown."""

    evaluations: tuple[FleetEvaluation, ...] = ()  # oldest first
    evaluated_unix: tuple[float, ...] = ()  # the time of each evaluation
    server_evaluations: tuple[ServerEvaluation, ...] = ()  # oldest first
    records: tuple[RoundRecord, ...] = ()  # of the newest rounds, oldest first
    # By client: its number of updates, and the newest round that has one.
    updates: dict[str, tuple[int, int]] = field(default_factory=dict)
    # By client: how often it was selected to train, and the round of the last time.
    asked: dict[str, tuple[int, int]] = field(default_factory=dict)
    heard: dict[str, float] = field(default_factory=dict)  # by client: when it last called
    revoked: frozenset[str] = frozenset()


def recall(store: Store, current: Round, comparison: Comparison) -> RecordedHistory:
    """Read the history before the current round. This blocks: call it in a thread."""
    undone = undone_rounds(store)
    records = store.records(current.number - REMEMBERED_ROUNDS, current.number - 1)
    is_evaluating = current.phase is Phase.EVALUATING
    last_version = current.number - 1 if is_evaluating else current.number
    versions = _spread(evaluated_versions(store, last_version, -1)[::-1])
    return RecordedHistory(
        evaluations=tuple(_evaluations(store, versions, comparison)),
        evaluated_unix=tuple(evaluated_unix(store, version) for version in versions),
        server_evaluations=tuple(
            result
            for result in recorded_server_evaluations(store)
            if result.version - 1 not in undone
        ),
        records=tuple(record for record in records if not record.undone),
        updates=update_counts(store, current.number),
        asked=times_asked(store),
        heard=last_heard(store),
        revoked=frozenset(store.revoked()),
    )


def newest_evaluation(
    store: Store, last_version: int, comparison: Comparison
) -> FleetEvaluation | None:
    """Return the newest evaluation up to a version, compared with the results before it."""
    newest = evaluated_versions(store, last_version, 1)
    if not newest:
        return None
    previous = evaluated_versions(store, newest[0] - 1, 1, with_results=True)
    return list(_evaluations(store, [*previous, *newest], comparison))[-1]


def _evaluations(
    store: Store, versions: list[int], comparison: Comparison
) -> Iterator[FleetEvaluation]:
    """Yield evaluations, each compared with the previous one that has results."""
    previous: Evaluations = {}
    for version in versions:
        results = evaluations_of(store, version)
        failures = evaluation_failures(store, version)
        yield FleetEvaluation.of(version, results, previous, failures, comparison)
        previous = results or previous


def _spread(versions: list[int]) -> list[int]:
    """Return a limited number of versions, with the newest two: they are compared."""
    if len(versions) <= MAX_EVALUATIONS:
        return versions
    spread_count = MAX_EVALUATIONS - 2
    step = len(versions) / spread_count
    spread = {versions[int(index * step)] for index in range(spread_count)}
    return sorted(spread | set(versions[-2:]))
