"""Clients that leave, fall silent or are revoked, and what the round does without them.

`Departures` ends sessions and reports lost clients to the round. `FleetWatch` looks now and then
for expired leases, for a fleet that is too small to train, and for the end of its time.
"""

from __future__ import annotations

import asyncio
import logging
import time

from fairfleet.common.errors import short
from fairfleet.common.names import round_name
from fairfleet.proto.v1 import operator_pb2 as pb
from fairfleet.server.federation.background import loop_time
from fairfleet.server.federation.clients.sessions import Session
from fairfleet.server.federation.round_runner import RoundRunner
from fairfleet.server.rounds import state_machine
from fairfleet.server.rounds.state_machine import Phase
from fairfleet.server.storage.client_queries import retirement_write

log = logging.getLogger(__name__)

SWEEP_SECONDS = 1.0
WAITING_NOTICE_SECONDS = 30.0
RECORD_SECONDS = 60.0  # between records of the time that the federation has run


class Departures:
    """Ends sessions, and lets the round continue without their clients."""

    def __init__(self, runner: RoundRunner) -> None:
        self._runner, self._sessions = runner, runner.sessions

    async def lose(self, client: str, *, gave_up: bool = False) -> None:
        """Continue the round without a client that does not do its task."""
        self._runner.assignments.release([client])
        # The client may be being selected at this moment: that is only known under the lock.
        await self._runner.record(state_machine.ClientLost(client, gave_up))

    async def depart(self, session: Session, reason: str, *, for_good: bool = False) -> None:
        """End a session, and continue the round without its client.

        With `for_good`, the round does not need another client in its place.
        """
        if session.finished and self._runner.result is not None:
            self._sessions.remove(session)  # as it was told to: nobody needs to hear of it
            self._runner.check_drained()
            return
        self.disconnect(session, reason, retired=for_good)
        if for_good:
            self._runner.assignments.release([session.client])
            await self._runner.record(state_machine.ClientRetired(session.client))
        else:
            await self.lose(session.client)
        self._runner.check_drained()

    async def retire(self, client: str, reason: str | None) -> None:
        """Record that a client's owner lets it take part no more, or with None that it does."""
        runner = self._runner
        write = retirement_write(client, reason, time.time())
        await runner.background.run_to_completion(
            runner.executors.in_database(runner.store.write, write)
        )
        if reason is None:
            runner.retired.pop(client, None)
        else:
            runner.retired[client] = reason

    def disconnect(self, session: Session, reason: str, *, retired: bool = False) -> None:
        """End a session and announce it; the round is not affected."""
        client, number = session.client, self._runner.round.number
        self._sessions.remove(session)
        self._runner.upload_registry.drop_late(client, number)
        self._runner.assignments.wake(client)
        about = {"client": client, "round": number}
        log.info(
            "client %s %s: %s",
            client,
            "has retired" if retired else "is gone",
            short(reason),
            extra=about,
        )
        gone = pb.ClientGone(
            client=client, reason=reason, connected=len(self._sessions), retired=retired
        )
        self._runner.emit(client_gone=gone)


class FleetWatch:
    """Checks periodically which clients are there, if they are enough, and if time is left."""

    def __init__(
        self,
        runner: RoundRunner,
        departures: Departures,
        lease_seconds: float,
        longest_wait_seconds: float | None,
    ) -> None:
        self._runner, self._departures = runner, departures
        self._lease_seconds, self._longest_wait_seconds = lease_seconds, longest_wait_seconds
        self._started = self._too_few_since = self._noticed = self._recorded = loop_time()

    async def run(self) -> None:
        """Check leases, the size of the fleet and its time until cancelled."""
        self.begin_waiting()
        while True:
            await asyncio.sleep(min(SWEEP_SECONDS, self._lease_seconds / 4))
            await self._record_time()
            await self._check_time_limit()
            await self._check_fleet_size()
            await self._end_leases()

    def begin_waiting(self) -> None:
        """Count the time with too few clients from now on."""
        self._too_few_since = self._noticed = loop_time()

    async def _record_time(self) -> None:
        """Record now and then for how long the federation has run, also in a long round."""
        runner, now = self._runner, loop_time()
        if now - self._recorded >= RECORD_SECONDS and runner.round.phase is not Phase.FINISHED:
            self._recorded = now
            await runner.executors.in_database(runner.store.write, runner.clock.write())

    async def _check_time_limit(self) -> None:
        """End a federation whose time is over while its round waits for clients.

        A round that trains is finished first. One that waits for more clients than have answered
        ends at its next deadline, as after `fairfleet stop`.
        """
        runner = self._runner
        round_, reason = runner.round, runner.time_is_over()
        if reason and round_.phase is Phase.WAITING and not round_.stopping:
            await runner.record(state_machine.StopRequested(reason))

    async def _end_leases(self) -> None:
        """End expired sessions.

        Clients selected before a restart that did not join again count as silent since the start.
        """
        sessions, now = self._runner.sessions, loop_time()
        for session in sessions.expired(now):
            # The client may have returned while others were handled.
            if session in sessions.expired(loop_time()):
                await self._departures.depart(session, f"silent for {self._lease_seconds:g} s")
        if now - self._started > self._lease_seconds:
            selected = self._runner.round.asked
            for client in [client for client in selected if sessions.get(client) is None]:
                await self._departures.lose(client)

    async def _check_fleet_size(self) -> None:
        """Log how many clients are missing; end the federation if that takes too long."""
        now, round_, longest = loop_time(), self._runner.round, self._longest_wait_seconds
        scheduler, sessions = self._runner.scheduler, self._runner.sessions.all()
        if round_.paused or not scheduler.missing_clients(round_, sessions):
            self._too_few_since = self._noticed = now
            return
        shortage = scheduler.too_few(sessions)
        if now - self._noticed >= WAITING_NOTICE_SECONDS:
            self._noticed = now
            log.info("%s: %s", round_name(round_.number), shortage)
        if longest is not None and now - self._too_few_since >= longest and not round_.stopping:
            log.warning("%s: %s, for %g s now", round_name(round_.number), shortage, longest)
            reason = f"{shortage}; gave up after {longest:g} s"
            await self._runner.record(state_machine.StopRequested(reason))


def revocation_message(client: str, reason: str) -> str:
    """Return the message for a client that was revoked."""
    return f"client {client} was revoked: {short(reason) or 'no reason given'}"
