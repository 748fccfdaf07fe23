"""The table of the history's rows: which past update represents each client.

The rows themselves are files (`history_files`). A file counts only while this table names it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from fairfleet.server.aggregation.rule_loss import LossOfRule, loss_for_rule
from fairfleet.server.rules import PastRow
from fairfleet.server.storage.queries import Write
from fairfleet.server.storage.schema import history
from fairfleet.server.storage.state_database import StateDatabase
from fairfleet.server.storage.update_table import StoredUpdate

# Built once: to build a statement takes longer than to execute it.
_DELETE = history.delete().where(
    history.c.client == sa.bindparam("name"), history.c.round == sa.bindparam("number")
)


class HistoryTable(StateDatabase):
    """The past updates that represent clients."""

    def history_rows(self) -> list[PastRow]:
        """Return the row of each client."""
        columns = (history.c.client, history.c.round, history.c.loss, history.c.samples)
        return [PastRow(*row) for row in self.rows(sa.select(*columns))]

    def history_digest(self, client: str, round_number: int) -> bytes | None:
        """Return the digest of the client's update if its row is of this round."""
        query = sa.select(history.c.digest).where(
            history.c.client == client, history.c.round == round_number
        )
        digest = self.scalar(query)
        return bytes.fromhex(digest) if digest else None

    @staticmethod
    def history_write(
        stored: Sequence[StoredUpdate],
        evicted: Sequence[PastRow] = (),
        rule_loss: LossOfRule = "before",
    ) -> Write:
        """Name the rows that represent their clients from now on, unless there are newer ones.

        Exactly the `evicted` rows are deleted: a newer row of the same client stays. `rule_loss`
        says which loss a row has.
        """

        def write(connection: Connection) -> None:
            newer = [_row(update, rule_loss) for update in _newer(connection, stored)]
            if evicted:
                keys = [{"name": past.client, "number": past.round} for past in evicted]
                connection.execute(_DELETE, keys)
            if newer:
                clients = [row["client"] for row in newer]
                connection.execute(history.delete().where(history.c.client.in_(clients)))
                connection.execute(history.insert(), newer)

        return write


def _newer(connection: Connection, stored: Sequence[StoredUpdate]) -> list[StoredUpdate]:
    """Return those updates that are newer than their clients' rows in the table."""
    if not stored:
        return []
    clients = [update.client for update in stored]
    query = sa.select(history.c.client, history.c.round).where(history.c.client.in_(clients))
    rounds = {row.client: row.round for row in connection.execute(query)}
    return [update for update in stored if rounds.get(update.client, -1) < update.round]


def _row(update: StoredUpdate, rule_loss: LossOfRule) -> Mapping[str, Any]:
    return {
        "client": update.client,
        "round": update.round,
        "digest": update.digest.hex(),
        "loss": loss_for_rule(update.report, rule_loss),
        "samples": update.report.samples,
    }
