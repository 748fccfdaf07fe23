"""What the database holds about each client: losses, updates, selections, and its last message.

Updates of undone rounds do not count: what is derived from them is as if they had not been sent.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple, TypeVar

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from fairfleet.common.reports import TrainReport
from fairfleet.server.aggregation.admission import RECENT_LOSSES, LossHistory
from fairfleet.server.aggregation.rule_loss import LossOfRule, loss_for_rule
from fairfleet.server.rounds.attendance import AttendanceBook
from fairfleet.server.rounds.selection import Candidate
from fairfleet.server.rounds.serialization import event_from_json
from fairfleet.server.rounds.state_machine import ClientsChosen, StepProposed
from fairfleet.server.storage.operations.undone_rounds import rounds_left_out, stands
from fairfleet.server.storage.queries import ReadableStore, Write
from fairfleet.server.storage.schema import clients as clients_table
from fairfleet.server.storage.schema import evaluations, journal, revocations, rounds, updates

_COUNTS = stands(updates.c.round)
E = TypeVar("E", ClientsChosen, StepProposed)


class ClientSoftware(NamedTuple):
    """What a client said of its software when it joined."""

    software: str = ""  # name and version
    features: tuple[str, ...] = ()


def first_losses(store: ReadableStore) -> dict[str, float]:
    """Return, by client, the loss of the received model at its first update."""
    return {client: report.loss_before for client, (_, report) in _first_reports(store).items()}


def initial_losses(store: ReadableStore) -> dict[str, float]:
    """Return, by client, its loss on version 0, as its first update reported it.

    In round 0, and for clients that did not measure it, that is the loss of the received model.
    """
    return {
        client: report.loss_before
        if number == 0 or report.initial_loss is None
        else report.initial_loss
        for client, (number, report) in _first_reports(store).items()
    }


def _first_reports(store: ReadableStore) -> dict[str, tuple[int, TrainReport]]:
    """Return, by client, the round and the report of its first update that counted.

    Means of batch losses are left out: rules that divide by the first loss mean an exact one.
    """
    first = sa.select(updates.c.client, sa.func.min(updates.c.round).label("round"))
    is_exact = updates.c.report.not_like('%"loss_measurement":"batches"%')
    earliest = first.where(_COUNTS, is_exact).group_by(updates.c.client).subquery()
    query = sa.select(updates.c.client, updates.c.round, updates.c.report).join(
        earliest, (updates.c.client == earliest.c.client) & (updates.c.round == earliest.c.round)
    )
    return {
        client: (number, TrainReport.model_validate_json(text))
        for client, number, text in store.rows(query)
    }


def loss_history(store: ReadableStore, before: int, which: LossOfRule = "before") -> LossHistory:
    """Return the losses before or after training that were reported before a round."""
    recent = _recent_losses(store, before, which)
    return LossHistory(_losses_at_start(store, before, which), recent)


def _recent_losses(store: ReadableStore, before: int, which: LossOfRule) -> dict[str, list[float]]:
    """Return, by client, the losses of its last rounds before a round, oldest first."""
    newest = sa.func.row_number().over(
        partition_by=updates.c.client, order_by=updates.c.round.desc()
    )
    ranked = sa.select(updates.c.client, updates.c.round, updates.c.report, newest.label("rank"))
    last = ranked.where(updates.c.round < before, _COUNTS).subquery()
    query = (
        sa.select(last.c.client, last.c.report)
        .where(last.c.rank <= RECENT_LOSSES)
        .order_by(last.c.round)
    )
    losses: dict[str, list[float]] = {}
    for client, text in store.rows(query):
        losses.setdefault(client, []).append(
            loss_for_rule(TrainReport.model_validate_json(text), which)
        )
    return losses


def _losses_at_start(store: ReadableStore, before: int, which: LossOfRule) -> list[float]:
    """Return the losses in the federation's first round, if it was before this one."""
    first = sa.select(sa.func.min(updates.c.round)).where(_COUNTS).scalar_subquery()
    query = sa.select(updates.c.report).where(updates.c.round == first, updates.c.round < before)
    return [
        loss_for_rule(TrainReport.model_validate_json(text), which) for (text,) in store.rows(query)
    ]


def past_candidates(store: ReadableStore) -> dict[str, Candidate]:
    """Return, by client, its newest round and its loss then."""
    return {
        client: Candidate(client, last_round=number, loss=report.loss_before)
        for client, (number, report) in newest_reports(store).items()
    }


def newest_reports(
    store: ReadableStore, before: int | None = None
) -> dict[str, tuple[int, TrainReport]]:
    """Return, by client, its newest round and its report then; only rounds `before`, if given."""
    newest = sa.select(updates.c.client, sa.func.max(updates.c.round).label("round"))
    newest = newest.where(_COUNTS).group_by(updates.c.client)
    latest = (newest if before is None else newest.where(updates.c.round < before)).subquery()
    query = sa.select(updates.c.client, updates.c.round, updates.c.report).join(
        latest, (updates.c.client == latest.c.client) & (updates.c.round == latest.c.round)
    )
    return {
        client: (number, TrainReport.model_validate_json(text))
        for client, number, text in store.rows(query)
    }


def update_counts(store: ReadableStore, before: int) -> dict[str, tuple[int, int]]:
    """Return, by client, how many updates it sent before this round, and the newest one's round."""
    query = sa.select(updates.c.client, sa.func.count(), sa.func.max(updates.c.round))
    query = query.where(updates.c.round < before, _COUNTS).group_by(updates.c.client)
    return {client: (count, newest) for client, count, newest in store.rows(query)}


def known_clients(store: ReadableStore) -> set[str]:
    """Return every client that sent an update or an evaluation, or was revoked."""
    queries = [
        sa.select(table.c.client).distinct() for table in (updates, evaluations, revocations)
    ]
    return {client for query in queries for (client,) in store.rows(query)}


def times_asked(store: ReadableStore) -> dict[str, tuple[int, int]]:
    """Return, by client, how often it was selected to train, and in which round last."""
    selections: dict[str, tuple[int, int]] = {}
    for number, clients in _training_selections(store):
        for client in clients:
            count, _ = selections.get(client, (0, 0))
            selections[client] = (count + 1, number)
    return selections


def recorded_attendance(store: ReadableStore) -> AttendanceBook:
    """Return when each client was last selected to train, and how many selections it missed since.

    A selection is missed if the client sent no update in it or later.
    """
    last_update = dict(tuple(row) for row in store.rows(_newest_rounds()))
    surplus, attendance, left_out = _surplus(store), AttendanceBook(), rounds_left_out(store)
    for number, clients in _training_selections(store):
        if number in left_out:
            continue
        fresh = {client for client in clients if attendance.of(client).last_selected != number}
        attendance.select(fresh, number)
        attendance.deliver(client for client in fresh if number <= last_update.get(client, -1))
        attendance.spare(fresh & surplus.get(number, set()), number)
    return attendance


def _training_selections(
    store: ReadableStore, round_number: int | None = None
) -> Iterator[tuple[int, Collection[str]]]:
    """Return the rounds of all selections to train, or of one round, and the selected clients."""
    for number, event in _events(store, ClientsChosen, round_number):
        if event.wanted:  # an evaluation needs no number of updates
            yield number, event.clients


def _events(
    store: ReadableStore, kind: type[E], round_number: int | None = None
) -> Iterator[tuple[int, E]]:
    """Return the journal's events of a kind with their rounds, in order."""
    query = sa.select(journal.c.round, journal.c.event).order_by(journal.c.sequence)
    query = query.where(journal.c.event.like(f'%"{kind.__name__}"%'))
    if round_number is not None:
        query = query.where(journal.c.round == round_number)
    for number, text in store.rows(query):
        event = event_from_json(text)
        if isinstance(event, kind):
            yield number, event


def _surplus(store: ReadableStore) -> dict[int, set[str]]:
    """Return, by round, the clients that were not needed because enough others had delivered."""
    query = sa.select(rounds.c.round, rounds.c.record).where(rounds.c.record.like('%"surplus"%'))
    return {number: set(json.loads(text).get("surplus", ())) for number, text in store.rows(query)}


def _newest_rounds() -> sa.Select[tuple[str, int]]:
    newest = sa.select(updates.c.client, sa.func.max(updates.c.round))
    return newest.where(_COUNTS).group_by(updates.c.client)


def asked_in(store: ReadableStore, round_number: int) -> frozenset[str]:
    """Return the clients that were ever selected to train in a round."""
    selections = _training_selections(store, round_number)
    return frozenset().union(*(clients for _, clients in selections))


def asked_to_verify(store: ReadableStore, round_number: int) -> frozenset[str]:
    """Return the clients that were ever selected to try a step of a round."""
    proposals = _events(store, StepProposed, round_number)
    return frozenset().union(*(event.clients for _, event in proposals))


def last_heard(store: ReadableStore) -> dict[str, float]:
    """Return, by client, when its newest update or evaluation was recorded."""
    heard: dict[str, float] = {}
    for table in (updates, evaluations):
        query = sa.select(table.c.client, sa.func.max(table.c.unix_seconds)).group_by(
            table.c.client
        )
        for client, unix in store.rows(query):
            heard[client] = max(unix, heard.get(client, 0.0))
    return heard


def client_software(store: ReadableStore) -> dict[str, ClientSoftware]:
    """Return, by client, its software and features as of its newest join."""
    query = sa.select(clients_table.c.client, clients_table.c.software, clients_table.c.features)
    return {
        client: ClientSoftware(software, tuple(json.loads(features)))
        for client, software, features in store.rows(query)
    }


def retired_clients(store: ReadableStore) -> dict[str, str]:
    """Return the clients whose owners let them take part no more, with the reason."""
    query = sa.select(clients_table.c.client, clients_table.c.retired)
    rows = store.rows(query.where(clients_table.c.retired.is_not(None)))
    return dict(tuple(row) for row in rows)


def retirement_write(client: str, reason: str | None, unix_seconds: float) -> Write:
    """Record why a client takes part no more; None: it does again."""

    def write(connection: Connection) -> None:
        change = clients_table.update().where(clients_table.c.client == client)
        if not connection.execute(change.values(retired=reason)).rowcount:
            row = {"client": client, "software": "", "features": "[]", "retired": reason}
            connection.execute(clients_table.insert(), {**row, "unix_seconds": unix_seconds})

    return write


def client_software_write(descriptions: Mapping[str, ClientSoftware], unix_seconds: float) -> Write:
    """Record the software and features of clients; what else is known of them stays."""

    def write(connection: Connection) -> None:
        for client, (software, features) in descriptions.items():
            values = {
                "software": software,
                "features": json.dumps(features),
                "unix_seconds": unix_seconds,
            }
            change = clients_table.update().where(clients_table.c.client == client).values(values)
            if not connection.execute(change).rowcount:
                connection.execute(clients_table.insert(), {"client": client, **values})

    return write
