"""The coordinator tells clients only what is durable, also during a write."""

from __future__ import annotations

import asyncio
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest

from fairfleet.common.errors import Revoked, TryLater, WrongState
from fairfleet.common.privacy import PrivacyTerms
from fairfleet.common.reports import Evaluation
from fairfleet.server.federation.coordinator import Coordinator
from fairfleet.server.federation.receipts import Receipt
from fairfleet.server.monitoring.monitor import Monitor
from fairfleet.server.rounds.state_machine import Phase
from fairfleet.server.settings import ServerSettings
from fairfleet.server.transfer.published_model import PublishedModel
from fairfleet.server.transfer.upload import Upload
from tests.support.coordinator_server import (
    Server,
    SlowStore,
    model,
    serving,
    short_deadlines,
    start_waiting,
    update_of,
)

HISTORY = {"rule": {"name": "fedfv", "tau": 5}}


def test_a_receipt_for_a_repeated_update_waits_until_the_first_is_on_the_disk(
    tmp_path: Path,
) -> None:
    async def scenario() -> None:
        async with serving(tmp_path / "s", round={"evaluate_every": 0}) as server:
            await server.join("a", "b")
            server.store.block()
            first = asyncio.ensure_future(server.send("a", 0))
            await server.store.wait_until_blocked()
            again = await start_waiting(server.open("a", 0))
            server.store.free.set()
            for receipt in (await first, await again):
                assert isinstance(receipt, Receipt)
                assert (receipt.counted, receipt.durable) == (True, True)

    asyncio.run(scenario())


def test_a_late_update_that_is_sent_twice_at_once_is_remembered_once(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path / "s", **HISTORY, **short_deadlines()) as server:
            await server.join("a", "b", "late")
            digest = await server.round_without("late", "a", "b")
            aggregated = threading.Event()
            aggregating = asyncio.ensure_future(
                server.coordinator.runner.executors.in_aggregator(aggregated.wait, 30)
            )
            twice = [await start_waiting(server.send("late", 0, digest)) for _ in range(2)]
            aggregated.set()
            assert [receipt.in_history for receipt in await asyncio.gather(*twice)] == [True, True]
            await aggregating
            await server.until(
                lambda: any(past.client == "late" for past in server.coordinator.state.past_rows())
            )
            assert (tmp_path / "s" / "history" / "late@0.npy").exists()

    asyncio.run(scenario())


def test_a_slow_late_upload_is_not_ended_by_later_rounds(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path / "s", **HISTORY, **short_deadlines()) as server:
            await server.join("a", "b", "late")
            digest = await server.round_without("late", "a", "b")
            opened = await server.open("late", 0, digest)
            assert isinstance(opened, Upload)
            await server.round_without("late", "a", "b")
            messages = update_of("late", 0)[1]
            assert (
                await server.coordinator.update_receiver.complete(opened, opened.token, messages)
            ).in_history

    asyncio.run(scenario())


def test_a_partial_late_upload_is_deleted_with_its_client(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path / "s", **HISTORY, **short_deadlines()) as server:
            await server.join("a", "b", "late")
            digest = await server.round_without("late", "a", "b")
            opened = await server.open("late", 0, digest)
            assert isinstance(opened, Upload)
            await server.coordinator.clients.leave(server.sessions["late"].id, "")
            with pytest.raises(WrongState, match="not open"):
                server.coordinator.update_receiver.under_way(opened.token)
            await server.join("late")
            assert (await server.send("late", 0, digest)).in_history

    asyncio.run(scenario())


def test_a_late_update_that_cannot_be_written_may_be_sent_again(
    tmp_path: Path,
) -> None:
    async def scenario() -> None:
        async with serving(tmp_path / "s", **HISTORY, **short_deadlines()) as server:
            await server.join("a", "b", "late")
            digest = await server.round_without("late", "a", "b")
            shutil.move(tmp_path / "s" / "history", tmp_path / "away")
            with pytest.raises(TryLater, match="cannot write to its disk"):
                await server.send("late", 0, digest)
            shutil.move(tmp_path / "away", tmp_path / "s" / "history")
            assert (await server.send("late", 0, digest)).in_history

    asyncio.run(scenario())


def test_a_deadline_of_an_evaluation_does_not_end_the_next_training(
    tmp_path: Path,
) -> None:
    async def scenario() -> None:
        once = {"evaluate_every": 1, "evaluation_deadline_seconds": 1.0}
        async with serving(tmp_path / "s", round=once) as server:
            coordinator = server.coordinator
            await server.join("a", "b")
            for client in "ab":
                await server.send(client, 0)
            await server.until(lambda: coordinator.state.round.phase is Phase.EVALUATING)
            await server.until(lambda: coordinator.state.activity("b") == "evaluate")
            evaluation = Evaluation(samples=1, loss=1.0, accuracy=0.5)
            await coordinator.clients.report_evaluation(
                server.sessions["a"].id, 1, evaluation, "", PrivacyTerms()
            )
            server.store.block()
            last = asyncio.ensure_future(
                coordinator.clients.report_evaluation(
                    server.sessions["b"].id, 1, evaluation, "", PrivacyTerms()
                )
            )
            await server.store.wait_until_blocked()
            await asyncio.sleep(1.2)  # The deadline of the evaluation passes.
            server.store.free.set()
            await last
            await asyncio.sleep(0.1)
            assert (coordinator.state.round.phase, coordinator.state.round.attempt) == (
                Phase.TRAINING,
                0,
            )

    asyncio.run(scenario())


def test_an_update_of_a_revoked_client_is_refused_even_in_transit(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path / "s", round={"minimum_clients": 3}) as server:
            await server.join("a", "b", "bad")
            opened = await server.open("bad", 0)
            assert isinstance(opened, Upload)
            await server.coordinator.operators.revoke("bad", "stolen")
            with pytest.raises(WrongState, match="given up"):
                await server.coordinator.update_receiver.complete(
                    opened, opened.token, update_of("bad", 0)[1]
                )
            assert server.coordinator.state.round.asked == {"a", "b"}
            assert not list((tmp_path / "s" / "uploads").iterdir())

    asyncio.run(scenario())


def test_a_revocation_completes_if_the_operator_disconnects(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path / "s", round={"minimum_clients": 3}) as server:
            await server.join("a", "b", "bad")
            server.store.block()
            revoking = asyncio.ensure_future(server.coordinator.operators.revoke("bad", "stolen"))
            await server.store.wait_until_blocked()  # The event is in the database.
            revoking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await revoking
            server.store.free.set()
            await server.until(lambda: server.coordinator.state.round.asked == {"a", "b"})
            assert server.coordinator.state.revoked == {"bad"}
            with pytest.raises(Revoked, match="stolen"):
                await server.join("bad")

    asyncio.run(scenario())


def test_an_error_while_storing_updates_ends_every_stream_and_the_server_can_stop(
    tmp_path: Path,
) -> None:
    async def scenario() -> None:
        store = SlowStore(tmp_path / "s")
        store.create("test", model(), PublishedModel.of(0, model()).digest)
        coordinator = Coordinator(
            store, ServerSettings.model_validate({"round": {"evaluate_every": 0}})
        )
        await coordinator.start()
        server = Server(coordinator, store)
        await server.join("a", "b")
        del coordinator.runner.scheduler._paces  # `record_duration` fails without it.
        async with coordinator.runner.lock:  # Both updates wait, and are stored together.
            sending = [await start_waiting(server.send(client, 0)) for client in "ab"]
        done, _ = await asyncio.wait(sending, timeout=20)
        assert [type(task.exception()) for task in done] == [AttributeError] * 2
        assert isinstance(coordinator.failed.exception(), AttributeError)
        await asyncio.wait_for(coordinator.stop(), 20)
        store.close()

    asyncio.run(scenario())


def test_a_late_update_after_the_stop_is_neither_counted_nor_stored(
    tmp_path: Path,
) -> None:
    async def scenario() -> None:
        async with serving(tmp_path / "s", **HISTORY, **short_deadlines()) as server:
            await server.join("a", "b", "c")
            await server.coordinator.operators.end("enough")
            await server.until(lambda: server.coordinator.state.round.phase is Phase.FINISHED)
            receipt = await server.send("a", 0)
            assert (receipt.counted, receipt.in_history) == (False, False)

    asyncio.run(scenario())


def test_a_paused_federation_does_not_stop_for_lack_of_clients(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(
            tmp_path / "s", round={"longest_wait_seconds": 0.2}, lease_seconds=0.4
        ) as server:
            await server.coordinator.operators.pause()
            await asyncio.sleep(0.6)
            assert server.coordinator.state.round.phase is Phase.WAITING
            await server.coordinator.operators.resume()
            await server.until(lambda: server.coordinator.state.round.phase is Phase.FINISHED)

    asyncio.run(scenario())


def test_the_surplus_of_over_selection_was_dropped_but_not_cut_off_by_a_deadline(
    tmp_path: Path,
) -> None:
    async def story() -> None:
        async with serving(
            tmp_path, **short_deadlines(clients=2, over_selection=1.5, deadline_seconds=60)
        ) as server:
            await server.join("a", "b", "c")
            await server.until(
                lambda: all(
                    server.coordinator.state.activity(client) == "train" for client in "abc"
                )
            )
            for client in "ab":
                await server.send(client, 0)
            await server.until(lambda: server.coordinator.state.publication.version == 1)
            (record,) = server.store.records(0, 0)
            assert (record.dropped, record.cut_off) == (("c",), ())

    asyncio.run(story())


def test_rows_that_the_history_forgets_are_counted(tmp_path: Path) -> None:
    async def scenario() -> None:
        tight = {"history": {"keep_bytes": 40}}
        async with serving(
            tmp_path / "s", **HISTORY, **tight, round={"evaluate_every": 0}
        ) as server:
            await server.join("a", "b")
            for client in "ab":
                await server.send(client, 0)
            await server.until(lambda: server.coordinator.state.publication.version == 1)
            page = Monitor(server.coordinator.state, server.store).metrics.registry
            assert page.get_sample_value("fairfleet_history_evicted_rows_total") == 1
            assert page.get_sample_value("fairfleet_history_rows") == 1
            assert len(list((tmp_path / "s" / "history").iterdir())) == 1

    asyncio.run(scenario())


def test_an_upload_of_a_client_that_left_is_deleted_with_its_round(tmp_path: Path) -> None:
    async def scenario() -> None:
        settings = short_deadlines(minimum_clients=4, quorum=0.5, deadline_seconds=1.0)
        async with serving(tmp_path / "s", **HISTORY, **settings) as server:
            await server.join("a", "b", "gone", "here")
            await server.until(lambda: server.coordinator.state.activity("gone") == "train")
            absent, connected = await server.open("gone", 0), await server.open("here", 0)
            await server.coordinator.clients.leave(server.sessions["gone"].id, "for ever")
            await server.round_without("here", "a", "b")
            registry = server.coordinator.runner.upload_registry
            assert isinstance(absent, Upload)
            assert isinstance(connected, Upload)
            assert (registry.holds(absent), registry.holds(connected)) == (False, True)

    asyncio.run(scenario())


def test_the_time_of_a_client_starts_at_its_selection_also_in_a_later_attempt(
    tmp_path: Path,
) -> None:
    async def scenario() -> None:
        settings = short_deadlines(minimum_clients=2, clients=2, quorum=1.0, deadline_seconds=1.0)
        async with serving(tmp_path / "s", **settings) as server:
            coordinator = server.coordinator
            await server.join("a", "silent")
            await server.until(lambda: coordinator.state.activity("a") == "train")
            await server.send("a", 0)
            await server.until(lambda: coordinator.state.round.attempt == 1)
            await server.join("later")
            await server.until(lambda: coordinator.state.activity("later") == "train")
            await server.send("later", 0)
            await server.until(lambda: coordinator.state.publication.version == 1)
            durations = coordinator.runner.scheduler._durations
            assert (
                durations["later", 0] < durations["silent", 0] - 0.99
            )  # It was selected one deadline later, and was not slower.

    asyncio.run(scenario())


def test_the_event_loop_does_not_wait_for_the_slow_disk_of_an_upload_that_is_given_up(
    tmp_path: Path,
) -> None:
    async def scenario(settings: dict[str, Any], folder: Path) -> None:
        async with serving(folder, **settings, **short_deadlines()) as server:
            await server.join("a", "b", "late")
            await server.until(lambda: server.coordinator.state.activity("late") == "train")
            late = await server.open("late", 0)
            assert isinstance(late, Upload)
            late.take(late.token, [])
            file = late.path
            assert file is not None
            assert file.exists()
            synced, syncing = threading.Event(), threading.Event()

            def slow_sync() -> None:
                with late._lock.taken():
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


def test_remaining_clients_evaluate_immediately_after_the_last_round(tmp_path: Path) -> None:
    async def leave_one() -> None:
        round_ = {"minimum_clients": 2, "quorum": 0.5, "evaluate_every": 5}
        async with serving(tmp_path, rounds=1, round=round_) as server:
            await server.join("ann", "bob")
            await server.send("ann", 0)
            await server.coordinator.clients.leave(server.sessions["bob"].id, "tired")
            await server.until(lambda: server.coordinator.state.activity("ann") == "evaluate")

    asyncio.run(leave_one())


def test_a_change_is_serialized_once_for_all_viewers(tmp_path: Path) -> None:
    async def watch() -> None:
        async with serving(tmp_path) as server:
            dashboard = Monitor(server.coordinator.state, server.store).dashboard
            pairs = [
                (await anext(dashboard._live(0)), await anext(dashboard._live(0))) for _ in range(3)
            ]
            assert any(first is second for first, second in pairs)  # A tick may pass between two.

    asyncio.run(watch())
