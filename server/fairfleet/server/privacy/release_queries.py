"""The durable record of releases: one row each, with its cost under the settings of its time.

The tables are created when they are first needed: a federation without privacy has none.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Sequence
from functools import partial

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from fairfleet.common.errors import WrongState
from fairfleet.common.names import round_name
from fairfleet.server.privacy.accountant import SampledRelease
from fairfleet.server.storage.queries import ReadableStore, Write, writing
from fairfleet.server.storage.schema import meta, rounds, updates
from fairfleet.server.storage.store import Store

EVERYONE = ""  # for a round of randomly drawn clients: it concerns all that might have been drawn
MODEL = "model"  # the round was committed
# Releases of a client in a round: an update, an evaluation, and what it had to compute again.
MOST_RELEASES = 8
NOISED_SINCE = "reports_noised_since"  # key of `meta`

releases = sa.Table(
    "releases",
    sa.MetaData(),
    sa.Column("round", sa.Integer, primary_key=True),
    sa.Column("client", sa.Text, primary_key=True),
    # An update's digest, "report" and a digest, "evaluation" and a digest, or MODEL.
    sa.Column("what", sa.Text, primary_key=True),
    # (sensitivity / noise)^2 as text, so that it may be inf.
    sa.Column("cost", sa.Text, nullable=False),
    # This and the next two describe a random draw; 0 without one.
    sa.Column("multiplier", sa.Float, nullable=False),
    sa.Column("drawn", sa.Integer, nullable=False),
    sa.Column("among", sa.Integer, nullable=False),
)
divergences = sa.Table(
    "divergences",
    sa.MetaData(),
    sa.Column("multiplier", sa.Float, primary_key=True),  # of a random draw, as the next two
    sa.Column("drawn", sa.Integer, primary_key=True),
    sa.Column("among", sa.Integer, primary_key=True),
    sa.Column("method", sa.Text, primary_key=True),  # that computed them
    sa.Column("found", sa.Text, nullable=False),  # a JSON list, one number per order
)


def make_table(store: Store) -> None:
    """Create the tables if they do not exist."""
    store.write(*(partial(table.create, checkfirst=True) for table in (releases, divergences)))


def keep_divergences(
    store: Store, draw: SampledRelease, method: str, values: Sequence[float]
) -> None:
    """Store divergences, which are costly, so that a restart need not compute them again."""
    row = {**draw._asdict(), "method": method}

    def write(connection: Connection) -> None:
        connection.execute(
            divergences.delete().where(
                *(divergences.c[name] == value for name, value in row.items())
            )
        )
        connection.execute(divergences.insert(), {**row, "found": json.dumps(list(values))})

    store.write(write)


def kept_divergences(store: ReadableStore, method: str) -> dict[SampledRelease, list[float]]:
    """Return the stored divergences that this method computed."""
    rows = store.rows(sa.select(divergences).where(divergences.c.method == method))
    return {
        SampledRelease(row.multiplier, row.drawn, row.among): json.loads(row.found) for row in rows
    }


def release(store: Store, round_number: int, client: str, what: str, cost: float) -> bool:
    """Record a release before it is received; return whether it is new, not a repetition.

    Raises WrongState after too many: otherwise one client could spend the whole federation's
    budget in a minute.
    """
    new = False
    of_client = (
        (releases.c.round == round_number)
        & (releases.c.client == client)
        & (releases.c.what != MODEL)
    )

    def write(connection: Connection) -> None:
        nonlocal new
        recorded = set(connection.scalars(sa.select(releases.c.what).where(of_client)))
        new = what not in recorded
        if new and len(recorded) >= MOST_RELEASES:
            raise WrongState(
                f"{client} has announced {len(recorded)} different results for "
                f"{round_name(round_number)}, and each reveals more of its data; no further one "
                "is accepted. "
                "Wait for the next round."
            )
        if new:
            connection.execute(releases.insert(), _row(round_number, client, what, cost))

    store.write(write)
    return new


def commit_write(
    round_number: int, clients: list[str], cost: float, draw: SampledRelease | None
) -> Write:
    """Return the write that records a committed round.

    It is a release of its participants, or, with a random draw, of all clients.
    """
    if draw is None:
        rows = [_row(round_number, client, MODEL, cost) for client in clients]
    else:
        rows = [{**_row(round_number, EVERYONE, MODEL, 0.0), **draw._asdict()}]

    def write(connection: Connection) -> None:
        connection.execute(releases.insert(), rows)

    return write


def costs(store: ReadableStore) -> dict[str, float]:
    """Return the total cost per client, without rounds of randomly drawn clients."""
    totals: defaultdict[str, float] = defaultdict(float)
    for row in store.rows(sa.select(releases).where(releases.c.among == 0)):
        totals[row.client] += float(row.cost)
    return dict(totals)


def draws(store: ReadableStore) -> dict[SampledRelease, int]:
    """Return how often each kind of random draw was released."""
    rows = store.rows(sa.select(releases).where(releases.c.among > 0))
    return dict(Counter(SampledRelease(row.multiplier, row.drawn, row.among) for row in rows))


def unprotected_rounds(store: ReadableStore, *, at_the_client: bool) -> int:
    """Count the committed rounds without privacy, or without privacy at the client."""
    mark = '%"privacy": {"where": "client"%' if at_the_client else '%"privacy": {%'
    plain = sa.select(sa.func.count()).select_from(rounds).where(rounds.c.record.not_like(mark))
    return int(store.rows(plain)[0][0])


def unprotected_updates(store: ReadableStore, round_number: int) -> int:
    """Count the updates of the current round that came without noise, before privacy was on."""
    released = sa.select(releases.c.what).where(releases.c.round == round_number)
    query = sa.select(sa.func.count()).where(
        updates.c.round == round_number, updates.c.digest.not_in(released)
    )
    return int(store.rows(query)[0][0])


def noised_since(store: Store, round_number: int, *, noised: bool) -> int:
    """Return the first round with noised reports; 0: all of them, or none are noised."""
    rows = store.rows(sa.select(meta.c.value).where(meta.c.key == NOISED_SINCE))
    if noised and rows:
        return int(rows[0].value)
    if rows:
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
