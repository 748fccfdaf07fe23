"""What earlier runs of the server recorded, read again so that a restart leaves no gap in what is shown."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from fairfleet.server.measures import REMEMBERED_ROUNDS, Served
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
    versions = _spread(store.evaluated_versions(finished, -1)[::-1])
    before = [None, *versions[:-1]]
    served = tuple(serve(store, version, earlier) for version, earlier in zip(versions, before, strict=True))
    return Recalled(
        served=served,
        evaluated_unix=tuple(store.evaluated_unix(version) for version in versions),
        records=tuple(store.records(round.number - REMEMBERED_ROUNDS, round.number - 1)),
        updates=store.update_counts(round.number),
        asked=store.times_asked(),
        heard=store.last_heard(),
        revoked=frozenset(store.revoked()),
    )


def newest_served(store: Store, last: int) -> Served | None:
    """By the newest version up to `last` that clients evaluated, compared with the one evaluated before it."""
    versions = store.evaluated_versions(last, 2)
    return serve(store, versions[0], versions[1] if versions[1:] else None) if versions else None


def serve(store: Store, version: int, earlier: int | None) -> Served:
    before = store.evaluations_of(earlier) if earlier is not None else {}
    return Served.of(version, store.evaluations_of(version), before, store.evaluation_failures(version))


def _spread(versions: list[int]) -> list[int]:
    """At most so many, the newest two among them: they are compared with each other."""
    if len(versions) <= EVALUATIONS:
        return versions
    step = len(versions) / (EVALUATIONS - 2)
    return sorted({versions[int(place * step)] for place in range(EVALUATIONS - 2)} | set(versions[-2:]))
