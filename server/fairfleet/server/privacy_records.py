"""What was released of each client, durably: one row per release, with what it cost under the settings of its time.

The table is made when it is first needed: a federation without privacy has none.
"""

from __future__ import annotations

from collections import Counter, defaultdict

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from fairfleet.server.accounting import Draw
from fairfleet.server.facts import Facts, Write
from fairfleet.server.schema import rounds, updates
from fairfleet.server.store import Store

EVERYONE = ""  # of a round whose clients were drawn by lot: it concerns all who might have been

releases = sa.Table(
    "releases",
    sa.MetaData(),
    sa.Column("round", sa.Integer, primary_key=True),
    sa.Column("client", sa.Text, primary_key=True),
    sa.Column("what", sa.Text, primary_key=True),  # digest of an update, of an evaluation; "model": it was committed
    sa.Column("cost", sa.Text, nullable=False),  # (sensitivity / noise)^2 in digits, so that it may be inf
    sa.Column("multiplier", sa.Float, nullable=False),  # of a draw by lot, as the next two; else 0
    sa.Column("drawn", sa.Integer, nullable=False),
    sa.Column("among", sa.Integer, nullable=False),
)


def make_table(store: Store) -> None:
    store.write(lambda connection: releases.create(connection, checkfirst=True))


def release(store: Store, round_number: int, client: str, what: str, cost: float) -> bool:
    """Writes a release down before anybody has it; whether it is a new one, not the repetition of an older."""
    new = False
    mine = (releases.c.round == round_number) & (releases.c.client == client) & (releases.c.what == what)

    def write(connection: Connection) -> None:
        nonlocal new
        new = connection.execute(sa.select(releases.c.cost).where(mine)).first() is None
        if new:
            connection.execute(releases.insert(), _row(round_number, client, what, cost))

    store.write(write)
    return new


def commit_write(round_number: int, clients: list[str], cost: float, draw: Draw | None) -> Write:
    """A model is committed: its round is released, of those who took part, or by lot of everyone."""
    if draw is None:
        rows = [_row(round_number, client, "model", cost) for client in clients]
    else:
        rows = [{**_row(round_number, EVERYONE, "model", 0.0), **draw._asdict()}]

    def write(connection: Connection) -> None:
        connection.execute(releases.insert(), rows)

    return write


def costs(store: Facts) -> dict[str, float]:
    """Per client: what was released of it for certain."""
    found: defaultdict[str, float] = defaultdict(float)
    for row in store.rows(sa.select(releases).where(releases.c.among == 0)):
        found[row.client] += float(row.cost)
    return dict(found)


def draws(store: Facts) -> dict[Draw, int]:
    found = store.rows(sa.select(releases).where(releases.c.among > 0))
    return dict(Counter(Draw(row.multiplier, row.drawn, row.among) for row in found))


def unprotected_rounds(store: Facts) -> int:
    """How many committed rounds had no privacy at all."""
    plain = sa.select(sa.func.count()).select_from(rounds).where(rounds.c.record.not_like('%"privacy": {%'))
    return int(store.rows(plain)[0][0])


def unprotected_updates(store: Facts, round_number: int) -> int:
    """How many updates of the round under way came without noise, before privacy was asked for."""
    here = sa.select(releases.c.client).where(releases.c.round == round_number)
    query = sa.select(sa.func.count()).where(updates.c.round == round_number, updates.c.client.not_in(here))
    return int(store.rows(query)[0][0])


def _row(round_number: int, client: str, what: str, cost: float) -> dict[str, object]:
    fixed = {"round": round_number, "client": client, "what": what, "cost": repr(float(cost))}
    return {**fixed, "multiplier": 0.0, "drawn": 0, "among": 0}
