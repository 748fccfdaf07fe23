"""Receives updates: checks who may send one, stores it, and answers with a receipt.

Updates that arrive while a transaction is written share the next one. An update that misses its
round may still enter the history. `receipts` says what became of an update.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

from fairfleet.common.errors import Refused, StateDirError, TryLater, WrongState
from fairfleet.common.names import round_name
from fairfleet.common.tensors import Vector
from fairfleet.server.federation.background import loop_time
from fairfleet.server.federation.event_stream import update_received_message
from fairfleet.server.federation.receipts import Receipt, Receipts
from fairfleet.server.federation.round_runner import RoundRunner
from fairfleet.server.privacy.budget import PrivacyBudget
from fairfleet.server.rounds import state_machine
from fairfleet.server.rounds.state_machine import Phase, Round
from fairfleet.server.storage.client_queries import asked_in
from fairfleet.server.storage.queries import Write
from fairfleet.server.storage.step_queries import ReportedLoss, late_report_write
from fairfleet.server.storage.store import StoredUpdate
from fairfleet.server.transfer.client_streams import ClientStreams
from fairfleet.server.transfer.counters import TrafficCounters
from fairfleet.server.transfer.upload import AnnouncedUpdate, Upload, check_announced, check_codec
from fairfleet.server.transfer.upload_registry import raw_bytes

ROUNDS_REMEMBERED = 16  # past rounds whose selected clients are cached
# Rows that arrive within so little time are multiplied together, which is cheaper.
GATHER_SECONDS = 0.05


@dataclass(frozen=True)
class ArrivedUpload:
    """A complete upload that waits to be recorded."""

    upload: Upload
    counted: asyncio.Future[bool]


class UpdateReceiver:
    """Receives the updates of the round under way, and late ones."""

    def __init__(self, runner: RoundRunner) -> None:
        self.traffic, self.streams = TrafficCounters(), ClientStreams()
        self._runner, self._receipts = runner, Receipts(runner)
        self._store, self._registry = runner.store, runner.upload_registry
        self._executors = runner.executors
        self._raw_bytes = raw_bytes(runner.store.signature())
        self._arrivals: list[ArrivedUpload] = []
        # Late updates are handled one by one: a client may send the same one twice.
        self._late_lock = asyncio.Lock()
        self._multiply_timer: asyncio.TimerHandle | None = None
        self._selected_in: dict[int, frozenset[str]] = {}  # by past round

    async def restore(self, updates: Mapping[str, StoredUpdate]) -> None:
        """Load the round's updates for which an earlier run of the server sent receipts."""
        round_ = self._runner.round
        self._registry.expect(round_.asked | round_.received)
        for client in round_.received:
            await self._executors.in_worker(self._registry.restore, updates[client])
            self._add_row(client)

    def stop(self) -> None:
        """Multiply no further rows by themselves."""
        if self._multiply_timer:
            self._multiply_timer.cancel()

    # ---- opening an upload ---------------------------------------------------------------------

    async def open(
        self,
        announced: AnnouncedUpdate,
        model_digest: bytes,
        codecs: AbstractSet[str] | None = None,
    ) -> Upload | Receipt:
        """Return where to send the update, or its receipt if it needs no sending.

        `codecs` are those that were agreed on; with None, any codec is accepted.
        """
        check_announced(announced, self._registry.limit_bytes)
        client, number = announced.client, announced.round
        await self.streams.settle(client)  # the resume offset includes what they received
        self._refuse_future(number)
        self._runner.scheduler.record_late_announcement(client, number, loop_time())
        was_selected = await self._was_selected(client, number)
        if self._runner.privacy_budget and was_selected:
            await self._spend(self._runner.privacy_budget, announced, model_digest)
        if receipt := await self._receipts.own(announced):
            return receipt
        base = None
        if announced.base:
            base = await self._base_of(announced)
            # An earlier stream may have completed the update meanwhile.
            if receipt := await self._receipts.own(announced):
                return receipt
        await self._check_model(client, number, model_digest)
        self._refuse_unselected(client, number, was_selected=was_selected)
        check_codec(announced, codecs)
        return await self._open_upload(announced, base)

    async def _open_upload(
        self, announced: AnnouncedUpdate, base: Vector | None
    ) -> Upload | Receipt:
        # Nothing may suspend between the search for a receipt and here. Otherwise an update that
        # was completed meanwhile would begin anew, over its own file.
        is_late = announced.round < self._runner.round.number
        upload = self._registry.upload_for(announced, base, in_memory=is_late)
        upload.may_hold_residual = self._runner.committer.has_participated(announced.client)
        await self._run_inline_or_in_worker(upload.opens_at_once, upload.reopen)
        if not self._registry.holds(upload):
            # An earlier stream completed it, or the round continued without it.
            return await self._receipts.own_or_retry(announced)
        self._registry.opened(upload)
        return upload

    def _refuse_future(self, number: int) -> None:
        current = self._runner.round.number
        if number > current:
            raise WrongState(
                f"{round_name(number)} is not known here; this server is at {round_name(current)}"
            )

    def _refuse_unselected(self, client: str, number: int, *, was_selected: bool) -> None:
        is_late = number < self._runner.round.number
        if not was_selected or not (is_late or self._runner.round.takes_update_of(client)):
            raise WrongState(
                f"client {client} was not selected to train in {round_name(number)}; "
                "request a new task"
            )

    async def _base_of(self, announced: AnnouncedUpdate) -> Vector:
        """Read the update that this one is delta-coded against."""
        client, bases = announced.client, self._registry.bases
        try:
            return await self._executors.in_worker(bases.read, client, announced.base)
        except StateDirError as error:
            bases.lose(client, announced.base)
            raise WrongState(
                f"the update of {client} cannot be read: {error} Request a new task."
            ) from error

    async def _check_model(self, client: str, number: int, model_digest: bytes) -> None:
        """Raise WrongState if the update was not computed on its round's model."""
        is_late = number < self._runner.round.number
        newest = self._runner.committer.publication
        trained = (
            await self._executors.in_database(self._store.model_digest, number)
            if is_late
            else newest.digest
        )
        if model_digest != trained:
            raise WrongState(
                f"the update of {client} was computed on model {model_digest.hex()[:16]}…; "
                f"{round_name(number)} trains {(trained or b'').hex()[:16]}…. Request a new task."
            )

    async def _was_selected(self, client: str, number: int) -> bool:
        """Return whether the client was selected to train in a round, which may be long past."""
        if number == self._runner.round.number:
            return self._runner.round.concerns(client)
        if number not in self._selected_in:
            clients = await self._executors.in_database(asked_in, self._store, number)
            while len(self._selected_in) >= ROUNDS_REMEMBERED:
                del self._selected_in[next(iter(self._selected_in))]
            self._selected_in[number] = clients
        return client in self._selected_in[number]

    async def _spend(
        self, budget: PrivacyBudget, announced: AnnouncedUpdate, model_digest: bytes
    ) -> None:
        """Count the release of a requested update, whatever becomes of it.

        The client may have begun to send it.
        """
        client, number = announced.client, announced.round
        receipt = await self._receipts.find(client, number)
        if receipt and receipt.digest == announced.digest:
            return  # it was counted when it arrived, under the terms of that time
        await self._check_model(client, number, model_digest)
        budget.refuse_weaker_update(client, announced.terms)
        round_ = self._runner.round
        if receipt or number < round_.number or round_.takes_update_of(client):
            release = (announced.digest, announced.terms, announced.report)
            await self._executors.in_database(budget.update_announced, client, number, *release)

    # ---- receiving -----------------------------------------------------------------------------

    def under_way(self, token: bytes) -> Upload:
        """Return the open upload with this token; raise WrongState if there is none."""
        return self._registry.by_token(token)

    async def take_chunks(self, upload: Upload, token: bytes, messages: list[bytes]) -> None:
        """Decode messages of an upload."""
        self.traffic.count_received(upload.announced.codec, sum(map(len, messages)))
        await self._run_inline_or_in_worker(upload.takes_at_once, upload.take, token, messages)

    def keep_chunks(
        self,
        upload: Upload,
        token: bytes,
        taking: asyncio.Future[None] | None,
        messages: list[bytes],
    ) -> None:
        """Decode the last messages of a broken stream after those under way, without waiting."""

        async def take() -> None:
            if taking is not None:
                await taking
            if messages:
                await self.take_chunks(upload, token, messages)

        self.streams.outlive(upload.announced.client, take())

    async def complete(self, upload: Upload, token: bytes, rest: list[bytes]) -> Receipt:
        """Decode the last messages of an upload, record it once, and return its receipt."""
        announced = upload.announced
        self.traffic.count_received(announced.codec, sum(map(len, rest)))
        try:
            finishing = self._run_inline_or_in_worker(
                upload.takes_at_once, upload.finish, token, rest
            )
            await asyncio.shield(self.streams.outlive(announced.client, finishing))
        except Refused:
            if upload.spoiled:
                self._registry.drop(upload)
            raise
        self.traffic.completed(announced.codec, announced.size_bytes, self._raw_bytes)
        is_late = announced.round < self._runner.round.number
        arrive = self._arrive_late if is_late else self._arrive
        return await self._runner.background.run_to_completion(arrive(upload))

    def discard(self, upload: Upload) -> None:
        """Drop an upload that can never become valid; the client's next one begins at 0."""
        self._registry.drop(upload)

    async def _run_inline_or_in_worker(
        self, is_quick: bool, work: Callable[..., Any], *args: Any
    ) -> None:
        if is_quick:
            work(*args)
        else:
            await self._executors.in_worker(work, *args)

    # ---- late updates --------------------------------------------------------------------------

    async def _arrive_late(self, upload: Upload) -> Receipt:
        """Enter a late update into the history if it is the client's newest.

        It is never part of a model that it was not computed on.
        """
        client, number = upload.announced.client, upload.announced.round
        async with self._late_lock:
            if not self._registry.holds(upload) or client in self._runner.revoked:
                raise WrongState(
                    f"the late update of {client} is no longer wanted; request a new task"
                )
            if self._runner.committer.wants_late(client, number):
                await self._remember_late(upload)
            else:
                self._registry.drop(upload)
        return await self._receipts.own_or_retry(upload.announced)

    async def _remember_late(self, upload: Upload) -> None:
        update, committer = self._registry.release(upload), self._runner.committer
        try:
            await self._executors.in_aggregator(committer.remember_late, update, upload.row)
        except OSError as error:  # nothing in the database names the file yet
            raise TryLater(f"the server cannot write to its disk: {error.strerror}") from error
        finally:
            self._registry.give_back(upload)
        loss = ReportedLoss.of(update.report, update.round)
        history = self._store.history_write([update], rule_loss=committer.rule_loss)
        writes = history, late_report_write(update.client, loss)
        await self._executors.in_database(self._store.write, *writes)
        await self._executors.in_aggregator(committer.late_is_named, update)

    # ---- updates of the round under way --------------------------------------------------------

    async def _arrive(self, upload: Upload) -> Receipt:
        announced = upload.announced
        arrival = ArrivedUpload(upload, asyncio.get_running_loop().create_future())
        self._arrivals.append(arrival)
        async with self._runner.lock:
            if self._arrivals:  # otherwise an earlier holder of the lock has recorded this one
                await self._take_arrivals()
        if await arrival.counted:
            return Receipt(announced.round, announced.digest, True, self._registry.durable)
        return await self._receipts.own_or_retry(announced)

    async def _take_arrivals(self) -> None:
        """Record all waiting arrivals in one transaction; the caller holds the lock.

        Every arrival gets an answer even if this fails: its stream, and the end of the server,
        wait for it.
        """
        arrivals, self._arrivals = self._arrivals, []
        try:
            await self._record_arrivals(arrivals)
        except Exception as error:
            # The state in memory differs from the state on the disk.
            self._runner.background.fail(error)
            for arrival in arrivals:
                if not arrival.counted.done():
                    arrival.counted.set_exception(error)
            return
        for arrival in arrivals:
            if not arrival.counted.done():
                arrival.counted.set_result(True)

    async def _record_arrivals(self, arrivals: Sequence[ArrivedUpload]) -> None:
        round_, events = self._runner.round, list[state_machine.Event]()
        writes, announcements = list[Write](), list[dict[str, Any]]()
        for arrival in arrivals:
            if not self._counts(arrival.upload, round_):
                self._refuse_arrival(arrival)
                continue
            update = self._accept(arrival.upload)
            events.append(state_machine.UpdateStored(update.client))
            round_, _ = state_machine.step(round_, events[-1], self._runner.policy)
            writes += [self._store.update_write(update)] if self._registry.durable else []
            announcements.append({"update_received": update_received_message(update, round_)})
        if round_.phase is Phase.AGGREGATING:
            self._multiply_now()  # while the transaction is written
        await self._runner.apply(*events, writes=writes, announcements=announcements)

    def _counts(self, upload: Upload, round_: Round) -> bool:
        """Return whether an upload becomes one of the round's updates."""
        client, number = upload.announced.client, upload.announced.round
        is_wanted = number == round_.number and round_.takes_update_of(client)
        return is_wanted and client not in self._runner.revoked and self._registry.holds(upload)

    def _refuse_arrival(self, arrival: ArrivedUpload) -> None:
        announced = arrival.upload.announced
        if self._registry.holds(arrival.upload):
            self._runner.continue_without(announced.client, announced.round)
        arrival.counted.set_result(False)

    def _accept(self, upload: Upload) -> StoredUpdate:
        """Make an upload one of the round's updates in memory; its client's task is done."""
        update, runner = self._registry.keep(upload), self._runner
        client = update.client
        self._add_row(client)
        seconds = loop_time() - runner.training_times.selected_at(client)
        runner.scheduler.record_duration(client, runner.round.number, seconds)
        runner.assignments.release([client])
        return update

    def _add_row(self, client: str) -> None:
        round_, (_, row) = self._runner.round, self._registry.complete_updates[client]
        selected = round_.asked | round_.received | round_.lost
        self._runner.committer.add(client, row, selected)
        if self._multiply_timer is None:
            loop = asyncio.get_running_loop()
            self._multiply_timer = loop.call_later(GATHER_SECONDS, self._multiply_now)

    def _multiply_now(self) -> None:
        """Multiply the rows that arrived: no other is awaited, or none came for a while."""
        self.stop()
        self._multiply_timer = None
        multiply = self._runner.committer.multiply
        self._runner.background.spawn(self._executors.in_aggregator(multiply))
