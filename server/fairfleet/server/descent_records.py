"""What is kept of steps: how clients found them when they tried, what they did to losses, whom deadlines cut off."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from fairfleet.server.facts import Facts, Write, writing
from fairfleet.server.schema import cut_off, measures, trials


@dataclass(frozen=True)
class Reported:
    """A client's loss on its training data, of the model that a round trained."""

    loss: float
    round: int


# ---- trials of a step --------------------------------------------------------------------------------


def trial_write(round_number: int, client: str, step: bytes, losses: Sequence[float] | None, failure: str) -> Write:
    """Takes the place of an earlier answer: of other lengths, before a restart with other settings."""
    row = {
        "round": round_number,
        "client": client,
        "step": step.hex(),
        "losses": None if losses is None else json.dumps(list(losses)),
        "failure": failure,
        "unix_seconds": time.time(),
    }
    this = (trials.c.round == round_number) & (trials.c.client == client) & (trials.c.step == step.hex())

    def write(connection: Connection) -> None:
        connection.execute(trials.delete().where(this))
        connection.execute(trials.insert(), row)

    return write


def trials_of(store: Facts, round_number: int, step: bytes) -> dict[str, tuple[float, ...] | None]:
    """By client: what it found, or None where it could not try this very step."""
    query = sa.select(trials.c.client, trials.c.losses)
    found = store.rows(query.where(trials.c.round == round_number, trials.c.step == step.hex()))
    return {row.client: None if row.losses is None else tuple(json.loads(row.losses)) for row in found}


# ---- measured steps, and those who were cut off --------------------------------------------------------


def measure_write(round_number: int, improved: float, clients: int) -> Write:
    row = {"round": round_number, "improved": improved, "clients": clients}
    return writing(measures.insert(), row)


def cut_off_write(round_number: int, clients: Mapping[str, Reported | None]) -> Write:
    """A round goes on without these clients, of whom this was the newest report."""
    rows = [
        {
            "round": round_number,
            "client": client,
            "loss_before": known.loss if known else None,
            "round_before": known.round if known else None,
        }
        for client, known in clients.items()
    ]
    return writing(cut_off.insert(), rows)


def came_back_write(reports: Mapping[str, Reported]) -> Write:
    """The next reports of clients that were cut off."""

    def write(connection: Connection) -> None:
        for client, now in reports.items():
            waiting = (cut_off.c.client == client) & cut_off.c.loss_after.is_(None) & (cut_off.c.round < now.round)
            connection.execute(cut_off.update().where(waiting).values(loss_after=now.loss, round_after=now.round))

    return write


def late_report_write(client: str, now: Reported) -> Write:
    """The update came after all, too late: it says what the loss was when the round went on without its client."""
    mine = (cut_off.c.client == client) & (cut_off.c.round == now.round)
    statement = cut_off.update().where(mine).values(loss_before=now.loss, round_before=now.round)
    return writing(statement)


def still_away(store: Facts) -> set[str]:
    """Clients that were cut off and have not reported since."""
    return {row.client for row in store.rows(sa.select(cut_off.c.client).where(cut_off.c.loss_after.is_(None)))}


def completed(store: Facts, records: list[dict[str, Any]], first: int, last: int) -> list[dict[str, Any]]:
    """Records of rounds, with what became known of them later."""
    measured = {
        row.round: {"improved": row.improved, "clients": row.clients}
        for row in store.rows(sa.select(measures).where(measures.c.round.between(first, last)))
    }
    without: defaultdict[int, list[dict[str, Any]]] = defaultdict(list)
    query = sa.select(cut_off).where(cut_off.c.round.between(first, last)).order_by(cut_off.c.client)
    for row in store.rows(query):
        known = {key: value for key, value in row._mapping.items() if key != "round" and value is not None}
        without[row.round].append(known)
    return [
        {**record, "measured": measured.get(record["round"]), "cut_off": without[record["round"]]} for record in records
    ]
