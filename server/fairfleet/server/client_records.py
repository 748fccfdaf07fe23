"""What the rounds so far say of each client."""

from __future__ import annotations

import sqlalchemy as sa

from fairfleet.common.reports import TrainReport
from fairfleet.server.facts import Facts
from fairfleet.server.journal import event_from_json
from fairfleet.server.rounds import ClientsChosen
from fairfleet.server.schema import evaluations, journal, revocations, updates
from fairfleet.server.selection import Candidate


def first_losses(store: Facts) -> dict[str, float]:
    """Per client: the loss of the received model at its first update."""
    first = sa.select(updates.c.client, sa.func.min(updates.c.round).label("round")).group_by(updates.c.client)
    earliest = first.subquery()
    query = sa.select(updates.c.client, updates.c.report).join(
        earliest, (updates.c.client == earliest.c.client) & (updates.c.round == earliest.c.round)
    )
    return {client: TrainReport.model_validate_json(text).loss_before for client, text in store.rows(query)}


def recent_losses(store: Facts, before: int, many: int) -> dict[str, list[float]]:
    """Per client: what it reported in its last rounds before this one, oldest first."""
    newest = sa.func.row_number().over(partition_by=updates.c.client, order_by=updates.c.round.desc())
    ranked = sa.select(updates.c.client, updates.c.round, updates.c.report, newest.label("place"))
    last = ranked.where(updates.c.round < before).subquery()
    query = sa.select(last.c.client, last.c.report).where(last.c.place <= many).order_by(last.c.round)
    found: dict[str, list[float]] = {}
    for client, text in store.rows(query):
        found.setdefault(client, []).append(TrainReport.model_validate_json(text).loss_before)
    return found


def losses_at_start(store: Facts, before: int) -> list[float]:
    """Of the federation's first round, if it is before this one."""
    first = sa.select(sa.func.min(updates.c.round)).scalar_subquery()
    query = sa.select(updates.c.report).where(updates.c.round == first, updates.c.round < before)
    return [TrainReport.model_validate_json(text).loss_before for (text,) in store.rows(query)]


def past_candidates(store: Facts, before: int | None = None) -> dict[str, Candidate]:
    """Per client: the newest round that it took part in, perhaps before a given one, and its loss then."""
    newest = sa.select(updates.c.client, sa.func.max(updates.c.round).label("round")).group_by(updates.c.client)
    latest = (newest if before is None else newest.where(updates.c.round < before)).subquery()
    query = sa.select(updates.c.client, updates.c.round, updates.c.report).join(
        latest, (updates.c.client == latest.c.client) & (updates.c.round == latest.c.round)
    )
    return {
        client: Candidate(client, last_round=number, loss=TrainReport.model_validate_json(text).loss_before)
        for client, number, text in store.rows(query)
    }


def update_counts(store: Facts, before: int) -> dict[str, tuple[int, int]]:
    """Per client: how many updates it gave in rounds before this one, and the round of the newest."""
    query = sa.select(updates.c.client, sa.func.count(), sa.func.max(updates.c.round))
    query = query.where(updates.c.round < before).group_by(updates.c.client)
    return {client: (count, newest) for client, count, newest in store.rows(query)}


def known_clients(store: Facts) -> set[str]:
    """Every client that a fact speaks of."""
    queries = [sa.select(table.c.client).distinct() for table in (updates, evaluations, revocations)]
    return {client for query in queries for (client,) in store.rows(query)}


def times_asked(store: Facts) -> dict[str, tuple[int, int]]:
    """Per client: how often it was asked to train, and in which round last."""
    query = sa.select(journal.c.round, journal.c.event).where(journal.c.event.like('%"ClientsChosen"%'))
    asked: dict[str, tuple[int, int]] = {}
    for number, text in store.rows(query.order_by(journal.c.sequence)):
        event = event_from_json(text)
        if isinstance(event, ClientsChosen) and event.wanted:  # an evaluation wants no number of updates
            for client in event.clients:
                asked[client] = (asked.get(client, (0, 0))[0] + 1, number)
    return asked


def last_heard(store: Facts) -> dict[str, float]:
    """Per client: when its newest update or evaluation was recorded."""
    heard: dict[str, float] = {}
    for table in (updates, evaluations):
        query = sa.select(table.c.client, sa.func.max(table.c.unix_seconds)).group_by(table.c.client)
        for client, unix in store.rows(query):
            heard[client] = max(unix, heard.get(client, 0.0))
    return heard
