"""What operators request of a running federation: pause, resume, end, revoke a client.

Each request is durable when its method returns. The writes that a method is given are part of the
request's transaction; they record who asked.
"""

from __future__ import annotations

import logging

from fairfleet.common.errors import WrongState
from fairfleet.common.names import round_name
from fairfleet.common.pki.identity import Identity, Role
from fairfleet.proto.v1 import operator_pb2 as pb
from fairfleet.server.federation.clients.departures import Departures, revocation_message
from fairfleet.server.federation.round_runner import RoundRunner
from fairfleet.server.rounds import state_machine
from fairfleet.server.rounds.state_machine import Phase
from fairfleet.server.security.caller import OpenCalls
from fairfleet.server.storage.queries import Write

log = logging.getLogger(__name__)


class OperatorControl:
    """Carries out the requests of operators."""

    def __init__(self, runner: RoundRunner, departures: Departures, calls: OpenCalls) -> None:
        self._runner, self._departures, self._calls = runner, departures, calls

    async def pause(self, *writes: Write) -> None:
        """Begin no further round until `resume`; the round under way is finished."""
        await self._runner.record(state_machine.Paused(), writes=writes)
        self._runner.emit(federation_paused=pb.FederationPaused())

    async def resume(self, *writes: Write) -> None:
        """Begin rounds again.

        Raises WrongState while something else keeps rounds from beginning: a stopping rule that
        can never apply, or too many clients that retired.
        """
        if self._runner.is_held:
            raise WrongState(f"cannot resume: {self._runner.held_because}")
        self._runner.emit(federation_resumed=pb.FederationResumed())
        await self._runner.record(state_machine.Resumed(), writes=writes)

    async def end(self, reason: str, *writes: Write) -> None:
        """End the federation."""
        await self._runner.record(state_machine.StopRequested(reason), writes=writes)

    async def revoke(self, client: str, reason: str, *writes: Write) -> None:
        """Exclude a client for good.

        It runs to completion even if the operator disconnects: a client that is revoked in the
        database must be revoked in memory as well.
        """
        await self._runner.background.run_to_completion(self._revoke(client, reason, *writes))

    async def _revoke(self, client: str, reason: str, *writes: Write) -> None:
        runner = self._runner
        await runner.executors.in_database(runner.store.revoke, client, reason, *writes)
        runner.revoked[client] = reason
        self._calls.end(Identity(Role.CLIENT, client), revocation_message(client, reason))
        runner.committer.shut_out(client)
        runner.upload_registry.drop_of(client)
        if session := runner.sessions.get(client):
            self._departures.disconnect(session, "revoked")
        runner.assignments.release([client])
        await runner.background.run_to_completion(self._remove_from_round(client))
        runner.check_drained()

    async def _remove_from_round(self, client: str) -> None:
        """Continue the round without a revoked client, and without its update if that is possible.

        The update is removed while the round is still being collected.
        """
        runner = self._runner
        async with runner.lock:
            round_, registry = runner.round, runner.upload_registry
            is_collecting = round_.phase in (Phase.WAITING, Phase.TRAINING)
            withdraws = is_collecting and client in round_.received
            writes = (
                [runner.store.withdrawal_write(client, round_.number)]
                if withdraws and registry.durable
                else []
            )

            def withdraw() -> None:
                if withdraws and registry.withdraw(client):
                    self._withdraw_row(client, round_.number)

            event = state_machine.ClientRevoked(client)
            await runner.apply(event, writes=writes, publish=withdraw)

    def _withdraw_row(self, client: str, number: int) -> None:
        executors, committer = self._runner.executors, self._runner.committer
        self._runner.background.spawn(executors.in_aggregator(committer.withdraw, client))
        about = {"client": client, "round": number}
        log.warning(
            "%s: the update of revoked client %s is removed",
            round_name(number),
            client,
            extra=about,
        )
