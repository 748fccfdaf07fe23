"""Records what operators do, with their names: in the transaction of the action, or before it.

An action that is refused is recorded too, with the reason. An operator's program that repeats a
refused call without end must not fill the disk: beyond a number per hour, refusals are only logged.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from fairfleet.common.errors import FleetError, short
from fairfleet.common.pki.identity import Identity, Role
from fairfleet.server.federation.background import loop_time
from fairfleet.server.security.caller import caller
from fairfleet.server.security.rate_limits import Bucket
from fairfleet.server.storage.operations.audit_queries import OperatorAction, audit_write
from fairfleet.server.storage.queries import WritableStore, Write

log = logging.getLogger(__name__)

REFUSALS_PER_MINUTE = 10
MOST_REFUSALS = 600  # at once


class AuditLog:
    """Makes the rows of the audit."""

    def __init__(self, store: WritableStore, in_database: Callable[..., Awaitable[Any]]) -> None:
        self._store, self._in_database = store, in_database
        self._refusals = Bucket(
            REFUSALS_PER_MINUTE, float(MOST_REFUSALS), loop_time(), MOST_REFUSALS
        )

    @asynccontextmanager
    async def recording(self, action: str, **arguments: Any) -> AsyncIterator[Write]:
        """Provide the write that records the caller's action; the block must carry it out.

        If the block refuses the action, the refusal is recorded instead. Arguments that are None
        were not given.
        """
        given = {name: value for name, value in arguments.items() if value is not None}
        performed = OperatorAction(operator_name(caller.get()), action, given)
        try:
            yield audit_write(performed)
        except FleetError as error:
            await self.refused(performed, str(error))
            raise

    async def done(self, action: str, **arguments: Any) -> None:
        """Record an action of the caller that changes nothing, before it is carried out."""
        performed = OperatorAction(operator_name(caller.get()), action, arguments)
        await self._in_database(self._store.write, audit_write(performed))

    async def refused(self, action: OperatorAction, reason: str) -> None:
        """Record that an action was refused."""
        who = f"operator {short(action.operator)}" if action.operator else "an operator"
        log.warning("refused %s of %s: %s", action.action, who, short(reason, 300))
        if self._refusals.take(loop_time()) == 0:
            await self._in_database(self._store.write, audit_write(action, reason))


def operator_name(who: Identity | None) -> str:
    """Return the name in an operator's certificate; empty without one."""
    return who.name if who is not None and who.role is Role.OPERATOR else ""
