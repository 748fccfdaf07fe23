"""What was released of each client, durably: one row per release, with what it cost under the settings of its time.

The table is made when it is first needed: a federation without privacy has none.
"""

from __future__ import annotations

from collections import Counter, defaultdict

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from fairfleet.common.errors import WrongState
from fairfleet.server.accounting import Draw
from fairfleet.server.facts import Facts, Write, writing
from fairfleet.server.schema import meta, rounds, updates
from fairfleet.server.store import Store

EVERYONE = ""  # of a round whose clients were drawn by lot: it concerns all who might have been
MODEL = "model"  # its round was committed
MOST_RELEASES = 8  # of a client in a round: an update and an evaluation, and what it had to make again
NOISED_SINCE = "reports_noised_since"  # key of `meta`

releases = sa.Table(
    "releases",
    sa.MetaData(),
    sa.Column("round", sa.Integer, primary_key=True),
    sa.Column("client", sa.Text, primary_key=True),
    sa.Column("what", sa.Text, primary_key=True),  # an update's digest, "report", "evaluation" and a digest, or MODEL
    sa.Column("cost", sa.Text, nullable=False),  # (sensitivity / noise)^2 in digits, so that it may be inf
    sa.Column("multiplier", sa.Float, nullable=False),  # of a draw by lot, as the next two; else 0
    sa.Column("drawn", sa.Integer, nullable=False),
    sa.Column("among", sa.Integer, nullable=False),
)


def make_table(store: Store) -> None:
    store.write(lambda connection: releases.create(connection, checkfirst=True))


def release(store: Store, round_number: int, client: str, what: str, cost: float) -> bool:
    """Writes a release down before anybody has it; whether it is a new one, not the repetition of an older.

    There is an end to them: else one client could spend the whole federation's budget in a minute.
    """
    new = False
    mine = (releases.c.round == round_number) & (releases.c.client == client) & (releases.c.what != MODEL)

    def write(connection: Connection) -> None:
        nonlocal new
        known = set(connection.scalars(sa.select(releases.c.what).where(mine)))
        new = what not in known
        if new and len(known) >= MOST_RELEASES:
            raise WrongState(
                f"{client} has announced {len(known)} different results for round {round_number}, and each tells more "
                "of its data; no other is taken. Wait for the next round."
            )
        if new:
            connection.execute(releases.insert(), _row(round_number, client, what, cost))

    store.write(write)
    return new


def commit_write(round_number: int, clients: list[str], cost: float, draw: Draw | None) -> Write:
    """A model is committed: its round is released, of those who took part, or by lot of everyone."""
    if draw is None:
        rows = [_row(round_number, client, MODEL, cost) for client in clients]
    else:
        rows = [{**_row(round_number, EVERYONE, MODEL, 0.0), **draw._asdict()}]

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


def unprotected_rounds(store: Facts, *, at_the_client: bool) -> int:
    """How many committed rounds had no privacy at all, or none that the server could not look behind."""
    mark = '%"privacy": {"where": "client"%' if at_the_client else '%"privacy": {%'
    plain = sa.select(sa.func.count()).select_from(rounds).where(rounds.c.record.not_like(mark))
    return int(store.rows(plain)[0][0])


def unprotected_updates(store: Facts, round_number: int) -> int:
    """How many updates of the round under way came without noise, before privacy was asked for."""
    here = sa.select(releases.c.what).where(releases.c.round == round_number)
    query = sa.select(sa.func.count()).where(updates.c.round == round_number, updates.c.digest.not_in(here))
    return int(store.rows(query)[0][0])


def noised_since(store: Store, round_number: int, *, noised: bool) -> int:
    """From which round on reports were noised, this one or an earlier; 0: from the beginning, or they are not."""
    known = store.rows(sa.select(meta.c.value).where(meta.c.key == NOISED_SINCE))
    if noised and known:
        return int(known[0].value)
    if known:
        store.write(writing(meta.delete().where(meta.c.key == NOISED_SINCE)))
    if not noised:
        return 0
    begun = store.rows(sa.select(updates.c.round).where(updates.c.round == round_number).limit(1))
    since = round_number + bool(begun)
    store.write(writing(meta.insert(), {"key": NOISED_SINCE, "value": str(since)}))
    return since


def _row(round_number: int, client: str, what: str, cost: float) -> dict[str, object]:
    fixed = {"round": round_number, "client": client, "what": what, "cost": repr(float(cost))}
    return {**fixed, "multiplier": 0.0, "drawn": 0, "among": 0}
