"""What earlier runs of the server recorded, read again so that a restart leaves no gap in what is shown."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from fairfleet.server.client_records import last_heard, times_asked, update_counts
from fairfleet.server.evaluation_records import evaluated_unix, evaluated_versions, evaluation_failures, evaluations_of
from fairfleet.server.measures import REMEMBERED_ROUNDS, Evaluations, Served
from fairfleet.server.rounds import Phase, Round
from fairfleet.server.store import Store

EVALUATIONS = 200  # of a longer federation, so many evenly spread ones are recalled


@dataclass(frozen=True)
class Recalled:
    served: tuple[Served, ...] = ()  # oldest first
    evaluated_unix: tuple[float, ...] = ()  # when, of each
    records: tuple[dict[str, Any], ...] = ()  # of the newest rounds
    updates: dict[str, tuple[int, int]] = field(default_factory=dict)  # by client: how many, and the newest round
    asked: dict[str, tuple[int, int]] = field(default_factory=dict)  # by client: how often, and when last
    heard: dict[str, float] = field(default_factory=dict)  # by client: when last
    revoked: frozenset[str] = frozenset()


def recall(store: Store, round: Round) -> Recalled:
    """From the database, in a thread."""
    finished = round.number - 1 if round.phase is Phase.EVALUATING else round.number
    versions = _spread(evaluated_versions(store, finished, -1)[::-1])
    return Recalled(
        served=tuple(_one_after_another(store, versions)),
        evaluated_unix=tuple(evaluated_unix(store, version) for version in versions),
        records=tuple(store.records(round.number - REMEMBERED_ROUNDS, round.number - 1)),
        updates=update_counts(store, round.number),
        asked=times_asked(store),
        heard=last_heard(store),
        revoked=frozenset(store.revoked()),
    )


def newest_served(store: Store, last: int) -> Served | None:
    """By the newest version up to `last` that clients were to evaluate, compared with the results before it."""
    newest = evaluated_versions(store, last, 1)
    if not newest:
        return None
    before = evaluated_versions(store, newest[0] - 1, 1, with_results=True)
    return list(_one_after_another(store, [*before, *newest]))[-1]


def _one_after_another(store: Store, versions: list[int]) -> Iterator[Served]:
    """Each compared with the one before it that has results."""
    before: Evaluations = {}
    for version in versions:
        now = evaluations_of(store, version)
        yield Served.of(version, now, before, evaluation_failures(store, version))
        before = now or before


def _spread(versions: list[int]) -> list[int]:
    """At most so many, the newest two among them: they are compared with each other."""
    if len(versions) <= EVALUATIONS:
        return versions
    step = len(versions) / (EVALUATIONS - 2)
    return sorted({versions[int(place * step)] for place in range(EVALUATIONS - 2)} | set(versions[-2:]))
