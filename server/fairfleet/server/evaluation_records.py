"""Clients' evaluations of versions: the results, and who gave none."""

from __future__ import annotations

import time
from collections import defaultdict

import sqlalchemy as sa

from fairfleet.common.reports import Evaluation
from fairfleet.server.facts import Facts, Write, writing
from fairfleet.server.schema import evaluations

_has_result = evaluations.c.evaluation.is_not(None)


def evaluation_write(version: int, client: str, evaluation: Evaluation | None, failure: str) -> Write:
    row = {
        "version": version,
        "client": client,
        "evaluation": evaluation.model_dump_json() if evaluation else None,
        "failure": failure,
        "unix_seconds": time.time(),
    }
    return writing(evaluations.insert(), row)


def evaluations_of(store: Facts, version: int) -> dict[str, Evaluation]:
    query = sa.select(evaluations.c.client, evaluations.c.evaluation)
    found = store.rows(query.where(evaluations.c.version == version, _has_result))
    return {row.client: Evaluation.model_validate_json(row.evaluation) for row in found}


def evaluated_unix(store: Facts, version: int) -> float:
    """When the last word on this version came in."""
    query = sa.select(sa.func.max(evaluations.c.unix_seconds)).where(evaluations.c.version == version)
    return float(store.rows(query)[0][0] or 0.0)


def evaluation_failures(store: Facts, version: int) -> dict[str, str]:
    """Who gave no result for this version, and why."""
    query = sa.select(evaluations.c.client, evaluations.c.failure)
    found = store.rows(query.where(evaluations.c.version == version, ~_has_result))
    return {row.client: row.failure for row in found}


def accuracies(store: Facts) -> dict[int, dict[str, float]]:
    """Of every version that was evaluated, by version and client."""
    query = sa.select(evaluations.c.version, evaluations.c.client, evaluations.c.evaluation)
    found: dict[int, dict[str, float]] = defaultdict(dict)
    for version, client, text in store.rows(query.where(_has_result)):
        accuracy = Evaluation.model_validate_json(text).accuracy
        if accuracy is not None:
            found[version][client] = accuracy
    return dict(found)


def evaluated_versions(store: Facts, last: int, count: int, *, with_results: bool = False) -> list[int]:
    """The newest versions, up to `last`, that clients were to evaluate; newest first. A count of -1: all.

    `with_results`: only those that some client could evaluate.
    """
    query = sa.select(evaluations.c.version).where(evaluations.c.version <= last)
    if with_results:
        query = query.where(_has_result)
    query = query.distinct().order_by(evaluations.c.version.desc())
    return [row.version for row in store.rows(query if count < 0 else query.limit(count))]


def newest_evaluations(store: Facts) -> dict[str, tuple[int, Evaluation]]:
    """Per client: the newest version that it could evaluate, and how that served it."""
    newest = sa.select(evaluations.c.client, sa.func.max(evaluations.c.version).label("version")).where(_has_result)
    latest = newest.group_by(evaluations.c.client).subquery()
    query = sa.select(evaluations.c.client, evaluations.c.version, evaluations.c.evaluation).join(
        latest, (evaluations.c.client == latest.c.client) & (evaluations.c.version == latest.c.version)
    )
    return {client: (version, Evaluation.model_validate_json(text)) for client, version, text in store.rows(query)}
