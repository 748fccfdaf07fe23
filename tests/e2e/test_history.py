"""Late is not lost: an update that misses its round stands for its client in later ones, over restarts too."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import grpc
import numpy as np
import pytest

from fairfleet.proto.v1 import fleet_pb2 as pb
from fairfleet.proto.v1.model_pb2 import Chunk
from tests.e2e.device import Device
from tests.e2e.fleet import Fleet, until

SOON = {"round__minimum_clients": 3, "round__deadline_seconds": 1.5, "round__quorum": 0.6, "lease_seconds": 60}


def test_a_late_update_refreshes_the_history_and_never_a_model_it_was_not_computed_on(fleet: Fleet) -> None:
    fleet.init()
    fleet.start_server(rounds=10_000, rule__name="fedfv", rule__tau=5, **SOON)
    for name in ("a", "b"):
        fleet.start_client(name, step_seconds=0.3)
    slow = Device(fleet.address, "slow")
    slow.join()
    slow.train_task()
    number = slow.task.round
    chunks, encoded = slow.encode(value=3.0)
    fleet.wait_for_version(number + 1)
    receipt = slow.send(slow.open(encoded).upload, chunks)
    assert (receipt.outcome, receipt.durable) == (pb.OUTCOME_HISTORY, True)
    assert slow.open(encoded).receipt.outcome == pb.OUTCOME_HISTORY  # however often it is sent
    assert fleet.query("select round, loss, samples from history where client = 'slow'") == [(number, 1.0, 10.0)]
    assert fleet.query("select count(*) from updates where client = 'slow'") == [(0,)]

    def stands_in() -> bool:
        return any("slow" in record["diagnostics"]["history_coefficients"] for record in fleet.records())

    until(stands_in, "the late row to be used")
    fleet.kill_server()
    before = set(fleet.query("select client, round from history"))
    fleet.start_server(rounds=10_000, rule__name="fedfv", rule__tau=5, **SOON)
    assert before == {(file.stem.split("@")[0], int(file.stem.split("@")[1])) for file in rows_of(fleet)}


def test_a_rule_without_history_ignores_what_is_late(fleet: Fleet) -> None:
    fleet.init()
    fleet.start_server(rounds=10_000, **SOON)
    for name in ("a", "b"):
        fleet.start_client(name)
    slow = Device(fleet.address, "slow")
    slow.join()
    slow.train_task()
    _, encoded = slow.encode()
    fleet.wait_for_version(slow.task.round + 1)
    assert slow.open(encoded).receipt.outcome == pb.OUTCOME_IGNORED


def test_an_upload_that_the_deadline_overtakes_goes_on_from_the_bytes_that_the_server_has(fleet: Fleet) -> None:
    fleet.init(200_000)
    fleet.start_server(rounds=10_000, rule__name="fedfv", rule__tau=5, **SOON)
    for name in ("a", "b"):
        fleet.start_client(name, step_seconds=0.3)
    slow = Device(fleet.address, "slow")
    slow.join()
    slow.train_task()
    chunks, encoded = slow.encode(value=3.0)
    half = chunks[: len(chunks) // 2]
    opened = slow.open(encoded)
    with pytest.raises(grpc.RpcError, match="the stream ended after"):
        slow.send(opened.upload, half)
    fleet.wait_for_version(slow.task.round + 1)
    opened = slow.open(encoded)
    assert opened.offset_bytes == sum(len(chunk.data) for chunk in half)
    assert slow.send(opened.upload, chunks[len(half) :]).outcome == pb.OUTCOME_HISTORY
    row = np.load(fleet.state / "history" / f"slow@{slow.task.round}.npy")
    assert (row == 3.0).all()


def test_a_stream_does_not_notice_that_its_round_went_on_without_it(fleet: Fleet) -> None:
    fleet.init(200_000)
    fleet.start_server(rounds=10_000, rule__name="fedfv", rule__tau=5, **SOON)
    for name in ("a", "b"):
        fleet.start_client(name, step_seconds=0.3)
    slow = Device(fleet.address, "slow")
    slow.join()
    slow.train_task()
    chunks, encoded = slow.encode(value=3.0)

    def dawdling() -> Iterator[Chunk]:
        yield from chunks[:2]
        fleet.wait_for_version(slow.task.round + 1)
        yield from chunks[2:]

    assert slow.send(slow.open(encoded).upload, dawdling()).outcome == pb.OUTCOME_HISTORY


def test_a_client_that_still_trains_at_the_deadline_goes_on_and_gets_into_the_history(fleet: Fleet) -> None:
    fleet.init()
    fleet.start_server(rounds=10_000, rule__name="fedfv", rule__tau=5, **(SOON | {"lease_seconds": 3}))
    for name in ("a", "b"):
        fleet.start_client(name)
    fleet.start_client("slow", shift=4, steps=50, step_seconds=0.05)
    until(lambda: history_of(fleet, "slow"), "the slow client's first row")
    first = history_of(fleet, "slow")
    until(lambda: history_of(fleet, "slow") > first, "its next one: it was given the next task when it was done")
    assert fleet.query("select count(*) from updates where client = 'slow'") == [(0,)]
    assert "was abandoned" not in fleet.log("slow.log")
    assert "client slow is gone" not in fleet.log("server.log")

    def stands_in() -> bool:
        return any("slow" in record["diagnostics"]["history_coefficients"] for record in fleet.records())

    until(stands_in, "the late row to be used")


def test_a_client_that_still_trains_at_the_deadline_stops_where_nobody_wants_its_update(fleet: Fleet) -> None:
    fleet.init()
    fleet.start_server(rounds=10_000, **(SOON | {"lease_seconds": 3}))
    for name in ("a", "b"):
        fleet.start_client(name)
    fleet.start_client("slow", steps=1200, step_seconds=0.05)
    until(lambda: "was abandoned" in fleet.log("slow.log"), "the slow client to stop")


def test_a_late_update_that_a_killed_client_left_is_sent_when_it_is_started_again(fleet: Fleet) -> None:
    settings = {"rounds": 10_000, "rule__name": "fedfv", "rule__tau": 5, **SOON}
    fleet.init()
    fleet.start_server(**settings)
    for name in ("a", "b"):
        fleet.start_client(name)
    fleet.start_client("slow", shift=4, steps=50, step_seconds=0.05)
    fleet.wait_for_version(1)
    fleet.kill_server()
    until((fleet.folder / "clients" / "slow" / "update.json").exists, "an update on the client's disk")
    fleet.kill_client("slow")
    fleet.start_server(**settings)
    fleet.start_client("slow", trouble="hang")
    until(lambda: history_of(fleet, "slow") == [(0,)], "the update that was left")


def history_of(fleet: Fleet, client: str) -> list[tuple[int]]:
    return fleet.query(f"select round from history where client = '{client}'")


def rows_of(fleet: Fleet) -> list[Path]:
    return sorted((fleet.state / "history").glob("*.npy"))
