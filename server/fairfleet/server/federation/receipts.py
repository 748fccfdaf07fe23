"""Receipts for updates: what became of the update of a client and round.

A receipt is final, and is given only when what it says is durable. It names one update by its
digest: the same update gets it again, any other one of the same client and round is refused.
"""

from __future__ import annotations

from dataclasses import dataclass

from fairfleet.common.errors import AnotherUpdateCounts, TryLater
from fairfleet.common.names import round_name
from fairfleet.server.federation.round_runner import RoundRunner
from fairfleet.server.rounds.state_machine import Phase
from fairfleet.server.transfer.upload import AnnouncedUpdate

IN_HISTORY = "it arrived too late for its round; the history uses it in later rounds"


@dataclass(frozen=True)
class Receipt:
    """What became of an update."""

    round: int
    digest: bytes  # of the update; empty if none was received in time
    counted: bool
    durable: bool
    reason: str = ""  # why it does not count
    in_history: bool = False  # too late for its round; the history uses it


class Receipts:
    """Finds the receipts of updates, in memory or in the database."""

    def __init__(self, runner: RoundRunner) -> None:
        self._runner = runner

    async def own(self, announced: AnnouncedUpdate) -> Receipt | None:
        """Return the receipt of this very update; None if the update may be sent.

        AnotherUpdateCounts is raised if another update of the same client and round has it.
        """
        receipt = await self.find(announced.client, announced.round)
        if receipt is None or receipt.digest in (b"", announced.digest):
            return receipt
        raise AnotherUpdateCounts(
            f"client {announced.client} has the receipt of another update for "
            f"{round_name(announced.round)}: {receipt.digest.hex()[:16]}… counts, "
            f"{announced.digest.hex()[:16]}… is refused. Discard it and request the next task.",
            digest=receipt.digest,
        )

    async def own_or_retry(self, announced: AnnouncedUpdate) -> Receipt:
        """Return the receipt of this update; raise TryLater if there is none."""
        if receipt := await self.own(announced):
            return receipt
        raise TryLater(
            f"{round_name(announced.round)} continued while the update of {announced.client} "
            "came in; open it again"
        )

    async def find(self, client: str, number: int) -> Receipt | None:
        """Return the receipt of a client and round; None if an update may still be sent.

        TryLater is raised while this is being decided.
        """
        round_ = self._runner.round
        if number > round_.number:
            return None
        if number == round_.number:
            if receipt := await self._of_complete(client):
                return receipt
            if round_.phase in (Phase.WAITING, Phase.TRAINING, Phase.EVALUATING):
                return None
            self._refuse_while_committing(client, number)
        return await self._of_past_round(client, number)

    async def _of_complete(self, client: str) -> Receipt | None:
        """Return the receipt of an update of the round under way, once it is durable."""
        runner = self._runner
        if client not in runner.upload_registry.complete_updates:
            return None
        number = runner.round.number
        update, _ = runner.upload_registry.complete_updates[client]
        async with runner.lock:  # the update's transaction may still be being written
            if runner.background.failed.done():
                raise TryLater("the server could not write to its database; try again")
            durable = runner.upload_registry.durable
            return Receipt(number, update.digest, counted=True, durable=durable)

    def _refuse_while_committing(self, client: str, number: int) -> None:
        round_ = self._runner.round
        is_selected = round_.phase is not Phase.FINISHED and round_.concerns(client)
        if is_selected and self._runner.wants_late(client, number):
            raise TryLater(
                f"{round_name(number)} is being committed without {client}; try again in a moment"
            )

    async def _of_past_round(self, client: str, number: int) -> Receipt | None:
        in_database, store = self._runner.executors.in_database, self._runner.store
        if stored := await in_database(store.update_of, client, number):
            return Receipt(number, stored.digest, counted=True, durable=True)
        if digest := await in_database(store.history_digest, client, number):
            return Receipt(
                number, digest, counted=False, durable=True, reason=IN_HISTORY, in_history=True
            )
        if self._runner.committer.wants_late(client, number):
            return None
        reason = f"{round_name(number)} continued without {client}; its update came too late"
        return Receipt(number, b"", counted=False, durable=True, reason=reason)
