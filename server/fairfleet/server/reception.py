"""Updates on their way in: who may send one, what becomes of it, and the receipt for it.

A receipt is given once, for good, and only when what it says is durable. Updates that arrive while a transaction is
written share the next one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from fairfleet.common import wire
from fairfleet.common.errors import Refused, StateDirError, TryLater, WrongState
from fairfleet.common.tensors import Vector
from fairfleet.proto.v1 import operator_pb2 as pb
from fairfleet.server import rounds
from fairfleet.server.descent_records import Reported, late_report_write
from fairfleet.server.facts import Write
from fairfleet.server.intake import raw_bytes
from fairfleet.server.round_loop import RoundLoop
from fairfleet.server.rounds import Phase, Round
from fairfleet.server.spending import Spending
from fairfleet.server.store import StoredUpdate
from fairfleet.server.traffic import Traffic
from fairfleet.server.uploads import Announced, Upload, check_announced

GATHER_SECONDS = 0.05  # rows that arrive within so little are multiplied together, which is cheaper than one by one
STANDS_IN = "it came too late for its round, and stands for its client in later ones"


@dataclass(frozen=True)
class Receipt:
    round: int
    digest: bytes
    counted: bool
    durable: bool
    reason: str = ""
    in_history: bool = False  # too late for its round; it stands for its client in later ones


@dataclass(frozen=True)
class Arrival:
    """A whole upload that waits to be recorded."""

    upload: Upload
    counted: asyncio.Future[bool]


class Reception:
    def __init__(self, loop: RoundLoop) -> None:
        self.traffic = Traffic()
        self._loop = loop
        self._store, self._intake, self._threads = loop.store, loop.intake, loop.threads
        self._raw_bytes = raw_bytes(loop.store.signature())
        self._arrivals: list[Arrival] = []
        self._late_lock = asyncio.Lock()  # one late update after the other: a client may send the same one twice
        self._gathering: asyncio.TimerHandle | None = None

    async def restore(self, updates: Mapping[str, StoredUpdate]) -> None:
        """Takes the round's updates up again that an earlier run of the server gave receipts for."""
        self._intake.expect(self._loop.round.asked | self._loop.round.received)
        for client in self._loop.round.received:
            await self._threads.in_worker(self._intake.restore, updates[client])
            self._add_row(client)

    def stop(self) -> None:
        if self._gathering:
            self._gathering.cancel()

    async def open(self, announced: Announced, model_digest: bytes) -> Upload | Receipt:
        check_announced(announced, self._intake.limit_bytes)
        client, number = announced.client, announced.round
        if number > self._loop.round.number:
            raise WrongState(f"round {number} is not known here; this server is at round {self._loop.round.number}")
        self._loop.came_late(client, number)
        if self._loop.spending:
            await self._spend(self._loop.spending, announced, model_digest)
        if receipt := await self._receipt_for(client, number):
            return receipt
        base = None
        if announced.base:
            base = await self._base_of(announced)
            if receipt := await self._receipt_for(client, number):  # an earlier stream of the same update came through
                return receipt
        await self._check_model(client, number, model_digest)
        late = number < self._loop.round.number
        if not late and not self._loop.round.takes_update_of(client):
            raise WrongState(f"client {client} was not asked to train in round {number}; ask for a new task")
        # Between the question for a receipt and here nothing may suspend: an update that came through meanwhile would
        # be begun anew, over its own file.
        upload = self._intake.upload_for(announced, base, in_memory=late)
        await self._unless(upload.opens_at_once, upload.reopen)
        if not self._intake.holds(upload):  # it came through by an earlier stream, or the round went on without it
            return await self._receipt_or_another_try(client, number)
        self._intake.opened(upload)
        return upload

    async def _base_of(self, announced: Announced) -> Vector:
        try:
            return await self._threads.in_worker(self._intake.bases.read, announced.client, announced.base)
        except StateDirError as error:
            self._intake.bases.lose(announced.client, announced.base)
            raise WrongState(f"the update of {announced.client} cannot be read: {error} Ask for a new task.") from error

    async def _check_model(self, client: str, number: int, model_digest: bytes) -> None:
        late = number < self._loop.round.number
        newest = self._loop.committer.publication
        trained = await self._threads.in_database(self._store.model_digest, number) if late else newest.digest
        if model_digest != trained:
            raise WrongState(
                f"the update of {client} was computed on model {model_digest.hex()[:16]}…; "
                f"round {number} trains {(trained or b'').hex()[:16]}…. Ask for a new task."
            )

    async def _spend(self, spending: Spending, announced: Announced, model_digest: bytes) -> None:
        """Of what a client was asked for, whatever becomes of it: it may be on its way already."""
        client, number = announced.client, announced.round
        receipt = await self._receipt_for(client, number)
        if receipt and receipt.digest == announced.digest:
            return  # it was counted when it came, under the terms of that time
        await self._check_model(client, number, model_digest)
        spending.refuse_weaker_update(client, announced.terms)
        if receipt or number < self._loop.round.number or self._loop.round.takes_update_of(client):
            made = (announced.digest, announced.terms, announced.report)
            await self._threads.in_database(spending.update_announced, client, number, *made)

    async def _receipt_for(self, client: str, number: int) -> Receipt | None:
        """The answer to an update that is here already, or that came too late; None: it may be sent."""
        if number > self._loop.round.number:
            return None
        if number == self._loop.round.number:
            if found := self._intake.whole.get(client):
                async with self._loop.lock:  # its transaction may still be being written
                    if self._loop.tasks.failed.done():
                        raise TryLater("the server could not write to its database; try again")
                    return Receipt(number, found[0].digest, counted=True, durable=self._intake.durable)
            if self._loop.round.phase in (Phase.WAITING, Phase.TRAINING, Phase.EVALUATING):
                return None
            over = self._loop.round.phase is Phase.FINISHED
            if not over and self._loop.committer.wants_late(client, number, ahead=1):
                raise TryLater(f"round {number} is being committed without {client}; try again in a moment")
        if stored := await self._threads.in_database(self._store.update_of, client, number):
            return Receipt(number, stored.digest, counted=True, durable=True)
        if digest := await self._threads.in_database(self._store.history_digest, client, number):
            return Receipt(number, digest, counted=False, durable=True, reason=STANDS_IN, in_history=True)
        if self._loop.committer.wants_late(client, number):
            return None
        late = f"round {number} went on without {client}; its update came too late"
        return Receipt(number, b"", counted=False, durable=True, reason=late)

    def under_way(self, token: bytes) -> Upload:
        return self._intake.by_token(token)

    async def take_chunks(self, upload: Upload, token: bytes, messages: list[bytes]) -> None:
        self.traffic.took(upload.announced.codec, sum(len(message) for message in messages))
        await self._unless(upload.takes_at_once, upload.take, token, messages)

    async def complete(self, upload: Upload, token: bytes, rest: list[bytes]) -> Receipt:
        """Makes an upload that is whole with these messages count, once; the receipt only when it is durable."""
        self.traffic.took(upload.announced.codec, sum(len(message) for message in rest))
        try:
            await self._unless(upload.takes_at_once, upload.finish, token, rest)
        except Refused:
            if upload.spoiled:
                self._intake.drop(upload)
            raise
        self.traffic.completed(upload.announced.codec, upload.announced.size_bytes, self._raw_bytes)
        late = upload.announced.round < self._loop.round.number
        return await self._loop.tasks.whole(self._arrive_late(upload) if late else self._arrive(upload))

    async def _unless(self, at_once: bool, work: Callable[..., Any], *given: Any) -> None:
        """In a worker thread, unless it is done at once."""
        if at_once:
            work(*given)
        else:
            await self._threads.in_worker(work, *given)

    async def _arrive_late(self, upload: Upload) -> Receipt:
        """Never part of a model that it was not computed on; but the client's newest word, if it is."""
        client, number = upload.announced.client, upload.announced.round
        async with self._late_lock:
            if not self._intake.holds(upload) or client in self._loop.revoked:
                raise WrongState(f"the late update of {client} is no longer wanted; ask for a new task")
            if self._loop.committer.wants_late(client, number):
                await self._remember_late(upload)
            else:
                self._intake.drop(upload)
        return await self._receipt_or_another_try(client, number)

    async def _remember_late(self, upload: Upload) -> None:
        update = self._intake.release(upload)
        try:
            await self._threads.in_aggregator(self._loop.committer.remember_late, update, upload.row)
        except OSError as error:  # no fact speaks of it yet
            raise TryLater(f"the server cannot write to its disk: {error.strerror}") from error
        finally:
            self._intake.give_back(upload)
        report = late_report_write(update.client, Reported(update.report.loss_before, update.round))
        await self._threads.in_database(self._store.write, self._store.history_write([update]), report)
        await self._threads.in_aggregator(self._loop.committer.late_is_named, update)

    async def _arrive(self, upload: Upload) -> Receipt:
        arrival = Arrival(upload, asyncio.get_running_loop().create_future())
        self._arrivals.append(arrival)
        async with self._loop.lock:
            if self._arrivals:  # else whoever had the lock before has taken this one along
                await self._take_arrivals()
        if await arrival.counted:
            return Receipt(upload.announced.round, upload.announced.digest, True, self._intake.durable)
        return await self._receipt_or_another_try(upload.announced.client, upload.announced.round)

    async def _receipt_or_another_try(self, client: str, number: int) -> Receipt:
        if receipt := await self._receipt_for(client, number):
            return receipt
        raise TryLater(f"round {number} went on while the update of {client} came in; open it again")

    async def _take_arrivals(self) -> None:
        """All that came while the last transaction was written go into one. Under the lock."""
        arrivals, self._arrivals = self._arrivals, []
        round, events, writes, news = self._loop.round, list[rounds.Event](), list[Write](), list[dict[str, Any]]()
        for arrival in arrivals:
            announced = arrival.upload.announced
            wanted = announced.round == round.number and round.takes_update_of(announced.client)
            if not wanted or announced.client in self._loop.revoked or not self._intake.holds(arrival.upload):
                if self._intake.holds(arrival.upload):
                    self._loop.go_on_without(announced.client, announced.round)
                arrival.counted.set_result(False)
                continue
            update = self._intake.keep(arrival.upload)
            self._add_row(announced.client)
            self._loop.took(announced.client)
            self._loop.roster.release([announced.client])
            events.append(rounds.UpdateStored(announced.client))
            round, _ = rounds.step(round, events[-1], self._loop.policy)
            writes += [self._store.update_write(update)] if self._intake.durable else []
            news.append({"update_received": update_received(update, round)})
        if round.phase is Phase.AGGREGATING:
            self._multiply_now()  # while the transaction is written
        try:
            await self._loop.apply(*events, writes=writes, news=news)
        except Exception as error:
            self._loop.tasks.fail(error)  # what is in memory is no longer what is on the disk
            for arrival in arrivals:
                if not arrival.counted.done():
                    arrival.counted.set_exception(error)
            return
        for arrival in arrivals:
            if not arrival.counted.done():
                arrival.counted.set_result(True)

    def _add_row(self, client: str) -> None:
        round = self._loop.round
        self._loop.committer.add(client, self._intake.whole[client][1], round.asked | round.received | round.lost)
        if self._gathering is None:
            loop = asyncio.get_running_loop()
            self._gathering = loop.call_later(GATHER_SECONDS, self._multiply_now)

    def _multiply_now(self) -> None:
        """No other row of the round is awaited any more, or none came for a while."""
        self.stop()
        self._gathering = None
        self._loop.tasks.spawn(self._threads.in_aggregator(self._loop.committer.multiply))

    def discard(self, upload: Upload) -> None:
        """An upload that can never become right: the client's next one begins at 0."""
        self._intake.drop(upload)


def update_received(update: StoredUpdate, round: Round) -> pb.UpdateReceived:
    """The news of an update, with the round that it led to."""
    return pb.UpdateReceived(
        client=update.client,
        size_bytes=update.size_bytes,
        report=wire.report_out(update.report),
        received=len(round.received),
        asked=len(round.asked),
    )
