"""The table of evaluations: each client's result for a version, or why it has none."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator

import sqlalchemy as sa

from fairfleet.common.reports import Evaluation
from fairfleet.server.rounds.missing_evaluations import NO_TEST_DATA
from fairfleet.server.storage.queries import ReadableStore, Write, writing
from fairfleet.server.storage.schema import evaluations, models, rounds

_has_result = evaluations.c.evaluation.is_not(None)
_undone = sa.select(rounds.c.round + 1).where(rounds.c.undone_by.is_not(None))
_stands = evaluations.c.version.not_in(_undone)  # a version whose round is not undone


def evaluation_write(
    version: int, client: str, evaluation: Evaluation | None, failure: str
) -> Write:
    """Record a client's evaluation of a version, or the `failure` if there is none."""
    row = {
        "version": version,
        "client": client,
        "evaluation": evaluation.model_dump_json() if evaluation else None,
        "failure": failure,
        "unix_seconds": time.time(),
    }
    return writing(evaluations.insert(), row)


def evaluations_of(store: ReadableStore, version: int) -> dict[str, Evaluation]:
    """Return the results for a version, by client."""
    query = sa.select(evaluations.c.client, evaluations.c.evaluation)
    rows = store.rows(query.where(evaluations.c.version == version, _has_result))
    return {row.client: Evaluation.model_validate_json(row.evaluation) for row in rows}


def evaluated_unix(store: ReadableStore, version: int) -> float:
    """Return when the last result or failure for a version was recorded; 0 if there is none."""
    query = sa.select(sa.func.max(evaluations.c.unix_seconds)).where(
        evaluations.c.version == version
    )
    return float(store.rows(query)[0][0] or 0.0)


def evaluation_failures(store: ReadableStore, version: int) -> dict[str, str]:
    """Return why there is no result for a version, by client."""
    query = sa.select(evaluations.c.client, evaluations.c.failure)
    rows = store.rows(query.where(evaluations.c.version == version, ~_has_result))
    return {row.client: row.failure for row in rows}


def evaluations_of_kept_models(store: ReadableStore) -> dict[int, list[Evaluation]]:
    """Return the results for each version whose model is kept, if there are any.

    Versions of rounds that were undone are left out.
    """
    is_kept = (models.c.version == evaluations.c.version) & models.c.file.is_not(None)
    query = sa.select(evaluations.c.version, evaluations.c.evaluation).join(models, is_kept)
    by_version: dict[int, list[Evaluation]] = defaultdict(list)
    for version, text in store.rows(query.where(_has_result, _stands)):
        by_version[version].append(Evaluation.model_validate_json(text))
    return dict(by_version)


def recorded_evaluations(store: ReadableStore) -> Iterator[tuple[int, str, Evaluation]]:
    """Yield version, client and result of every evaluation, in the order they were recorded."""
    query = sa.select(evaluations.c.version, evaluations.c.client, evaluations.c.evaluation)
    query = query.order_by(evaluations.c.version, evaluations.c.unix_seconds)
    for version, client, text in store.rows(query.where(_has_result)):
        yield version, client, Evaluation.model_validate_json(text)


def evaluated_versions(
    store: ReadableStore, last: int, count: int, *, with_results: bool = False
) -> list[int]:
    """Return the newest `count` versions up to `last` that were evaluated, newest first.

    A count of -1 means all. `with_results` leaves out versions without any result. Versions of
    rounds that were undone are left out.
    """
    query = sa.select(evaluations.c.version).where(evaluations.c.version <= last, _stands)
    if with_results:
        query = query.where(_has_result)
    query = query.distinct().order_by(evaluations.c.version.desc())
    return [row.version for row in store.rows(query if count < 0 else query.limit(count))]


def newest_evaluations(store: ReadableStore) -> dict[str, tuple[int, Evaluation]]:
    """Return, by client, the newest version with a result, and the result.

    Versions of rounds that were undone are left out.
    """
    newest = sa.select(
        evaluations.c.client, sa.func.max(evaluations.c.version).label("version")
    ).where(_has_result, _stands)
    latest = newest.group_by(evaluations.c.client).subquery()
    query = sa.select(evaluations.c.client, evaluations.c.version, evaluations.c.evaluation).join(
        latest,
        (evaluations.c.client == latest.c.client) & (evaluations.c.version == latest.c.version),
    )
    return {
        client: (version, Evaluation.model_validate_json(text))
        for client, version, text in store.rows(query)
    }


def was_asked(store: ReadableStore, version: int, client: str) -> bool:
    """Return whether a client was selected to evaluate a version, and its answer is recorded."""
    query = sa.select(evaluations.c.client).where(
        evaluations.c.version == version,
        evaluations.c.client == client,
        evaluations.c.failure != NO_TEST_DATA,
    )
    return bool(store.rows(query))
