"""The coordinator between its threads: what a client may hear while something is still being written."""

from __future__ import annotations

import asyncio
import shutil
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fairfleet.common.errors import TryLater, WrongState
from fairfleet.common.privacy import Terms
from fairfleet.common.reports import Evaluation, TrainReport
from fairfleet.common.stream import Encoded, encode, model_pieces
from fairfleet.common.tensors import Model
from fairfleet.server.coordinator import Coordinator
from fairfleet.server.monitoring import Monitoring
from fairfleet.server.publication import Publication
from fairfleet.server.reception import Receipt
from fairfleet.server.rounds import Phase
from fairfleet.server.sessions import Member, Session
from fairfleet.server.settings import ServerSettings
from fairfleet.server.store import Store
from fairfleet.server.uploads import Announced, Upload

REPORT = TrainReport(samples=10, loss_before=1.0, loss_after=0.5, steps=1, learning_rate=0.1)
HISTORY = {"rule": {"name": "fedfv", "tau": 5}}


class SlowStore(Store):
    """Its transactions wait while `free` is not set: a slow disk."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.free, self.waiting = threading.Event(), threading.Event()
        self.free.set()

    def record(self, *given: Any) -> None:
        self._wait()
        super().record(*given)

    def write(self, *given: Any) -> None:
        self._wait()
        super().write(*given)

    def _wait(self) -> None:
        if not self.free.is_set():
            self.waiting.set()
            self.free.wait(30)

    def hold(self) -> None:
        self.waiting.clear()
        self.free.clear()

    async def held(self) -> None:
        """Until a transaction waits."""
        assert await asyncio.to_thread(self.waiting.wait, 30)


class Server:
    def __init__(self, coordinator: Coordinator, store: SlowStore) -> None:
        self.coordinator, self.store = coordinator, store
        self.sessions: dict[str, Session] = {}

    async def join(self, *clients: str) -> None:
        for client in clients:
            self.sessions[client] = await self.coordinator.join(Member(client, client, "", 10, 10, "raw32"))

    async def open(self, client: str, number: int, digest: bytes | None = None) -> Upload | Receipt:
        """The upload of an update that belongs to this client and round, and to the newest model if no other."""
        coordinator = self.coordinator
        encoded, _ = update_of(client, number)
        announced = Announced(client, number, "raw32", encoded.size_bytes, encoded.digest, REPORT)
        model = digest or coordinator.publication.digest
        return await coordinator.uploads.open(announced, model)

    async def send(self, client: str, number: int, digest: bytes | None = None) -> Receipt:
        opened = await self.open(client, number, digest)
        if isinstance(opened, Receipt):
            return opened
        return await self.coordinator.uploads.complete(opened, opened.token, update_of(client, number)[1])

    async def until(self, condition: Callable[[], bool]) -> None:
        for _ in range(3000):
            if condition():
                return
            await asyncio.sleep(0.01)
        raise AssertionError(f"never came: {self.coordinator.round}")

    async def round_without(self, late: str, *others: str) -> bytes:
        """A round that the deadline ends without one client; the digest of the model that it trained."""
        number, digest = self.coordinator.round.number, self.coordinator.publication.digest
        await self.until(lambda: self.coordinator.doing(late) == "train")
        for client in others:
            await self.send(client, number)
        await self.until(lambda: self.coordinator.publication.version == number + 1)
        return digest


def model() -> Model:
    return Model.of({"w": np.zeros(10, np.float32)})


def update_of(client: str, number: int) -> tuple[Encoded, list[bytes]]:
    row, messages = model(), list[bytes]()
    row.parameters[:] = number + ord(client[0])
    return encode(model_pieces(row), lambda head, data: messages.append(b"".join((head, data)))), messages


@asynccontextmanager
async def serving(folder: Path, **settings: Any) -> AsyncIterator[Server]:
    store = SlowStore(folder)
    store.create("test", model(), Publication.of(0, model()).digest)
    coordinator = Coordinator(store, ServerSettings.model_validate({"rounds": 1000, **settings}))
    await coordinator.start()
    try:
        yield Server(coordinator, store)
        assert not coordinator.failed.done(), coordinator.failed
    finally:
        store.free.set()
        await coordinator.stop()
        store.close()


async def goes_on(work: Awaitable[Any]) -> asyncio.Task[Any]:
    """The work, which is not done although everything else had its turn."""
    task = asyncio.ensure_future(work)
    done, _ = await asyncio.wait([task], timeout=0.3)
    assert not done
    return task  # type: ignore[return-value]


def soon(**round: Any) -> dict[str, Any]:
    """Deadlines that pass soon, and three clients of whom two suffice."""
    return {"round": {"minimum_clients": 3, "quorum": 0.6, "deadline_seconds": 0.3, "evaluate_every": 0, **round}}


def test_a_receipt_for_a_repeated_update_waits_until_the_first_is_on_the_disk(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path / "s", round={"evaluate_every": 0}) as server:
            await server.join("a", "b")
            server.store.hold()
            first = asyncio.ensure_future(server.send("a", 0))
            await server.store.held()
            again = await goes_on(server.open("a", 0))
            server.store.free.set()
            for receipt in (await first, await again):
                assert isinstance(receipt, Receipt)
                assert (receipt.counted, receipt.durable) == (True, True)

    asyncio.run(scenario())


def test_a_late_update_that_is_sent_twice_at_once_is_remembered_once(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path / "s", **HISTORY, **soon()) as server:
            await server.join("a", "b", "late")
            digest = await server.round_without("late", "a", "b")
            aggregated = threading.Event()
            aggregating = asyncio.ensure_future(server.coordinator._loop.threads.in_aggregator(aggregated.wait, 30))
            twice = [await goes_on(server.send("late", 0, digest)) for _ in range(2)]
            aggregated.set()
            assert [receipt.in_history for receipt in await asyncio.gather(*twice)] == [True, True]
            await aggregating
            await server.until(lambda: any(past.client == "late" for past in server.coordinator.past_rows()))
            assert (tmp_path / "s" / "history" / "late@0.npy").exists()

    asyncio.run(scenario())


def test_a_slow_late_upload_is_not_cut_off_by_the_rounds_that_go_on(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path / "s", **HISTORY, **soon()) as server:
            await server.join("a", "b", "late")
            digest = await server.round_without("late", "a", "b")
            opened = await server.open("late", 0, digest)
            assert isinstance(opened, Upload)
            await server.round_without("late", "a", "b")
            messages = update_of("late", 0)[1]
            assert (await server.coordinator.uploads.complete(opened, opened.token, messages)).in_history

    asyncio.run(scenario())


def test_half_a_late_upload_goes_with_its_client(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path / "s", **HISTORY, **soon()) as server:
            await server.join("a", "b", "late")
            digest = await server.round_without("late", "a", "b")
            opened = await server.open("late", 0, digest)
            assert isinstance(opened, Upload)
            await server.coordinator.leave(server.sessions["late"].id, "")
            with pytest.raises(WrongState, match="not open"):
                server.coordinator.uploads.under_way(opened.token)
            await server.join("late")
            assert (await server.send("late", 0, digest)).in_history

    asyncio.run(scenario())


def test_a_late_update_that_finds_no_room_is_kept_by_its_client_and_the_server_goes_on(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path / "s", **HISTORY, **soon()) as server:
            await server.join("a", "b", "late")
            digest = await server.round_without("late", "a", "b")
            shutil.move(tmp_path / "s" / "history", tmp_path / "away")
            with pytest.raises(TryLater, match="cannot write to its disk"):
                await server.send("late", 0, digest)
            shutil.move(tmp_path / "away", tmp_path / "s" / "history")
            assert (await server.send("late", 0, digest)).in_history

    asyncio.run(scenario())


def test_a_deadline_that_passes_while_its_evaluation_ends_is_not_the_next_trainings(tmp_path: Path) -> None:
    async def scenario() -> None:
        once = {"evaluate_every": 1, "evaluation_deadline_seconds": 1.0}
        async with serving(tmp_path / "s", round=once) as server:
            coordinator = server.coordinator
            await server.join("a", "b")
            for client in "ab":
                await server.send(client, 0)
            await server.until(lambda: coordinator.round.phase is Phase.EVALUATING)
            await server.until(lambda: coordinator.doing("b") == "evaluate")
            found = Evaluation(samples=1, loss=1.0, accuracy=0.5)
            await coordinator.report_evaluation(server.sessions["a"].id, 1, found, "", Terms())
            server.store.hold()
            last = asyncio.ensure_future(coordinator.report_evaluation(server.sessions["b"].id, 1, found, "", Terms()))
            await server.store.held()
            await asyncio.sleep(1.2)  # past the evaluation's deadline
            server.store.free.set()
            await last
            await asyncio.sleep(0.1)
            assert (coordinator.round.phase, coordinator.round.attempt) == (Phase.TRAINING, 0)

    asyncio.run(scenario())


def test_a_revoked_client_is_not_heard_even_if_its_update_is_on_its_way(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path / "s", round={"minimum_clients": 3}) as server:
            await server.join("a", "b", "bad")
            opened = await server.open("bad", 0)
            assert isinstance(opened, Upload)
            await server.coordinator.revoke("bad", "stolen")
            with pytest.raises(WrongState, match="given up"):
                await server.coordinator.uploads.complete(opened, opened.token, update_of("bad", 0)[1])
            assert server.coordinator.round.asked == {"a", "b"}
            assert not list((tmp_path / "s" / "uploads").iterdir())

    asyncio.run(scenario())


def test_a_client_that_hung_until_the_federation_was_stopped_is_not_told_to_try_again_for_ever(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path / "s", **HISTORY, **soon()) as server:
            await server.join("a", "b", "c")
            await server.coordinator.end("enough")
            await server.until(lambda: server.coordinator.round.phase is Phase.FINISHED)
            receipt = await server.send("a", 0)
            assert (receipt.counted, receipt.in_history) == (False, False)

    asyncio.run(scenario())


def test_a_paused_federation_does_not_give_up_for_want_of_clients(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path / "s", round={"longest_wait_seconds": 0.2}, lease_seconds=0.4) as server:
            await server.coordinator.pause()
            await asyncio.sleep(0.6)
            assert server.coordinator.round.phase is Phase.WAITING
            await server.coordinator.resume()
            await server.until(lambda: server.coordinator.round.phase is Phase.FINISHED)

    asyncio.run(scenario())


def test_the_surplus_of_over_selection_was_dropped_but_not_cut_off_by_a_deadline(tmp_path: Path) -> None:
    async def story() -> None:
        async with serving(tmp_path, **soon(clients=2, over_selection=1.5, deadline_seconds=60)) as server:
            await server.join("a", "b", "c")
            await server.until(lambda: all(server.coordinator.doing(client) == "train" for client in "abc"))
            for client in "ab":
                await server.send(client, 0)
            await server.until(lambda: server.coordinator.publication.version == 1)
            (record,) = server.store.records(0, 0)
            assert (record["dropped"], record["cut_off"]) == (["c"], [])

    asyncio.run(story())


def test_rows_that_the_history_forgets_are_counted(tmp_path: Path) -> None:
    async def scenario() -> None:
        tight = {"history": {"keep_bytes": 40}}
        async with serving(tmp_path / "s", **HISTORY, **tight, round={"evaluate_every": 0}) as server:
            await server.join("a", "b")
            for client in "ab":
                await server.send(client, 0)
            await server.until(lambda: server.coordinator.publication.version == 1)
            page = Monitoring(server.coordinator, server.store).metrics.registry
            assert page.get_sample_value("fairfleet_history_evicted_rows_total") == 1
            assert page.get_sample_value("fairfleet_history_rows") == 1
            assert len(list((tmp_path / "s" / "history").iterdir())) == 1

    asyncio.run(scenario())


def test_what_a_client_sent_goes_with_the_round_if_the_client_is_gone(tmp_path: Path) -> None:
    async def scenario() -> None:
        settings = soon(minimum_clients=4, quorum=0.5, deadline_seconds=1.0)
        async with serving(tmp_path / "s", **HISTORY, **settings) as server:
            await server.join("a", "b", "gone", "here")
            await server.until(lambda: server.coordinator.doing("gone") == "train")
            gone, here = await server.open("gone", 0), await server.open("here", 0)
            await server.coordinator.leave(server.sessions["gone"].id, "for ever")
            await server.round_without("here", "a", "b")
            intake = server.coordinator._intake
            assert isinstance(gone, Upload)
            assert isinstance(here, Upload)
            assert (intake.holds(gone), intake.holds(here)) == (False, True)

    asyncio.run(scenario())


def test_the_time_of_a_client_runs_from_when_it_was_asked_also_in_a_later_attempt(tmp_path: Path) -> None:
    async def scenario() -> None:
        settings = soon(minimum_clients=2, clients=2, quorum=1.0, deadline_seconds=1.0)
        async with serving(tmp_path / "s", **settings) as server:
            coordinator = server.coordinator
            await server.join("a", "silent")
            await server.until(lambda: coordinator.doing("a") == "train")
            await server.send("a", 0)
            await server.until(lambda: coordinator.round.attempt == 1)
            await server.join("later")
            await server.until(lambda: coordinator.doing("later") == "train")
            await server.send("later", 0)
            await server.until(lambda: coordinator.publication.version == 1)
            took = coordinator._loop.scheduler._durations
            assert took["later", 0] < took["silent", 0] - 0.99  # it was asked a deadline later, and done no later

    asyncio.run(scenario())


def test_the_event_loop_does_not_wait_for_the_slow_disk_of_an_upload_that_is_given_up(tmp_path: Path) -> None:
    async def scenario(settings: dict[str, Any], folder: Path) -> None:
        async with serving(folder, **settings, **soon()) as server:
            await server.join("a", "b", "late")
            await server.until(lambda: server.coordinator.doing("late") == "train")
            late = await server.open("late", 0)
            assert isinstance(late, Upload)
            late.take(late.token, [])
            file = late.path
            assert file is not None
            assert file.exists()
            synced, syncing = threading.Event(), threading.Event()

            def slow_sync() -> None:
                with late._turn.taken():
                    syncing.set()
                    synced.wait(30)

            worker = asyncio.ensure_future(asyncio.to_thread(slow_sync))
            await asyncio.to_thread(syncing.wait, 30)
            await server.round_without("late", "a", "b")
            assert not synced.is_set(), "the round was committed meanwhile"
            assert file.exists()
            synced.set()
            await worker
            await server.until(lambda: not file.exists())

    for name, settings in (("history", HISTORY), ("none", {})):
        asyncio.run(scenario(settings, tmp_path / name))


def test_who_is_left_when_the_last_round_is_committed_evaluates_at_once(tmp_path: Path) -> None:
    async def leave_one() -> None:
        round = {"minimum_clients": 2, "quorum": 0.5, "evaluate_every": 5}
        async with serving(tmp_path, rounds=1, round=round) as server:
            await server.join("ann", "bob")
            await server.send("ann", 0)
            await server.coordinator.leave(server.sessions["bob"].id, "tired")
            await server.until(lambda: server.coordinator.doing("ann") == "evaluate")

    asyncio.run(leave_one())


def test_what_changed_is_written_once_for_all_who_watch(tmp_path: Path) -> None:
    async def watch() -> None:
        async with serving(tmp_path) as server:
            dashboard = Monitoring(server.coordinator, server.store).dashboard
            pairs = [(await anext(dashboard._live(0)), await anext(dashboard._live(0))) for _ in range(3)]
            assert any(one is other for one, other in pairs)  # a tick may pass between two

    asyncio.run(watch())
