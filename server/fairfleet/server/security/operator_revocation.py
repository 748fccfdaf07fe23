"""Revoked operators: a lost operator credential is refused, just as a lost client credential is.

Revocations are durable, take effect at once and end the open calls of the operator.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from fairfleet.common.errors import Revoked, short
from fairfleet.common.pki.identity import Identity, Role
from fairfleet.server.security.caller import OpenCalls
from fairfleet.server.storage.queries import WritableStore, Write
from fairfleet.server.storage.schema import revoked_operators

log = logging.getLogger(__name__)


class Operators:
    """The revoked operators, in memory and in the database."""

    def __init__(
        self, store: WritableStore, in_database: Callable[..., Awaitable[Any]], calls: OpenCalls
    ) -> None:
        self._store, self._in_database, self._calls = store, in_database, calls
        self._revoked = {row.name: row.reason for row in store.rows(sa.select(revoked_operators))}

    async def revoke(self, name: str, reason: str, *writes: Write) -> None:
        """Revoke an operator durably, and end its open calls.

        Further `writes` are part of the transaction.
        """
        await self._in_database(self._store.write, _revocation(name, reason), *writes)
        self._revoked[name] = reason
        self._calls.end(Identity(Role.OPERATOR, name), self._message(name))
        log.info("operator %s was revoked: %s", short(name), short(reason) or "no reason given")

    def refuse_revoked(self, name: str) -> None:
        """Raise Revoked if this operator was revoked."""
        if name in self._revoked:
            raise Revoked(self._message(name))

    def _message(self, name: str) -> str:
        return (
            f"operator {short(name)} was revoked: {short(self._revoked[name]) or 'no reason given'}"
        )


def _revocation(name: str, reason: str) -> Write:
    def write(connection: Connection) -> None:
        connection.execute(revoked_operators.delete().where(revoked_operators.c.name == name))
        connection.execute(revoked_operators.insert().values(name=name, reason=reason))

    return write
