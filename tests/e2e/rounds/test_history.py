"""A late update counts in later rounds through the history, also after a restart."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import grpc
import numpy as np
import pytest

from fairfleet.proto.v1 import fleet_pb2 as pb
from fairfleet.proto.v1.model_pb2 import Chunk
from fairfleet.server.aggregation.half_rows import ScaledRow
from fairfleet.server.storage.files.checksummed_arrays import read_scaled_row
from tests.support.device import Device
from tests.support.fleet import Fleet, until

SOON = {
    "round__minimum_clients": 3,
    "round__deadline_seconds": 1.5,
    "round__quorum": 0.6,
    "lease_seconds": 60,
}


def test_a_late_update_changes_the_history_but_no_model_it_was_not_computed_on(
    fleet: Fleet,
) -> None:
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
    assert slow.open(encoded).receipt.outcome == pb.OUTCOME_HISTORY  # at every repetition
    assert fleet.query("select round, loss, samples from history where client = 'slow'") == [
        (number, 1.0, 10.0)
    ]
    assert fleet.query("select count(*) from updates where client = 'slow'") == [(0,)]

    def stands_in() -> bool:
        return any(
            "slow" in record["diagnostics"]["history_coefficients"] for record in fleet.records()
        )

    until(stands_in, "the late row to be used")
    fleet.kill_server()
    before = set(fleet.query("select client, round from history"))
    fleet.start_server(rounds=10_000, rule__name="fedfv", rule__tau=5, **SOON)
    assert before == {
        (file.stem.split("@")[0], int(file.stem.split("@")[1])) for file in rows_of(fleet)
    }


def test_a_late_update_of_a_client_that_was_not_selected_in_that_round_is_refused(
    fleet: Fleet,
) -> None:
    fleet.init()
    settings = {
        "rounds": 10_000,
        "rule__name": "fedfv",
        "rule__tau": 5,
        **SOON,
        "round__minimum_clients": 2,
    }
    for start in range(2):  # the selection is known after a restart, too
        fleet.start_server(**settings)
        if not start:
            for name in ("a", "b"):
                fleet.start_client(name, step_seconds=0.1)
        fleet.wait_for_version(fleet.version() + 1)
        outsider = Device(fleet.address, "outsider")
        outsider.join()
        outsider.train_task()
        (digest,) = fleet.query("select digest from models where version = 0")[0]
        _, encoded = outsider.encode(value=3.0)
        with pytest.raises(grpc.RpcError, match="was not selected to train in round 1") as caught:
            outsider.open(encoded, round=0, model_digest=bytes.fromhex(digest))
        assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        outsider.leave()
        fleet.kill_server()
    assert not fleet.query("select * from history where client = 'outsider'")


@pytest.mark.slow
def test_a_rule_without_history_ignores_late_updates(fleet: Fleet) -> None:
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


@pytest.mark.slow
def test_an_upload_that_misses_the_deadline_resumes_at_the_servers_offset(
    fleet: Fleet,
) -> None:
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


@pytest.mark.slow
def test_a_stream_continues_when_its_round_ends_without_it(fleet: Fleet) -> None:
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


@pytest.mark.slow
def test_a_client_still_training_at_the_deadline_finishes_for_the_history(
    fleet: Fleet,
) -> None:
    fleet.init()
    fleet.start_server(
        rounds=10_000, rule__name="fedfv", rule__tau=5, **(SOON | {"lease_seconds": 3})
    )
    for name in ("a", "b"):
        fleet.start_client(name)
    fleet.start_client("slow", shift=4, steps=50, step_seconds=0.05)
    until(lambda: history_of(fleet, "slow"), "the slow client's first row")
    first = history_of(fleet, "slow")
    until(
        lambda: history_of(fleet, "slow") > first,
        "its next one: it was given the next task when it was done",
    )
    assert fleet.query("select count(*) from updates where client = 'slow'") == [(0,)]
    assert "was abandoned" not in fleet.log("slow.log")
    assert "client slow is gone" not in fleet.log("server.log")

    def stands_in() -> bool:
        return any(
            "slow" in record["diagnostics"]["history_coefficients"] for record in fleet.records()
        )

    until(stands_in, "the late row to be used")


@pytest.mark.slow
def test_a_client_still_training_at_the_deadline_stops_if_its_update_is_useless(
    fleet: Fleet,
) -> None:
    fleet.init()
    fleet.start_server(rounds=10_000, **(SOON | {"lease_seconds": 3}))
    for name in ("a", "b"):
        fleet.start_client(name)
    fleet.start_client("slow", steps=1200, step_seconds=0.05)
    until(lambda: "was abandoned" in fleet.log("slow.log"), "the slow client to stop")


@pytest.mark.slow
def test_a_late_update_of_a_killed_client_is_sent_after_its_restart(
    fleet: Fleet,
) -> None:
    settings = {"rounds": 10_000, "rule__name": "fedfv", "rule__tau": 5, **SOON}
    fleet.init()
    fleet.start_server(**settings)
    for name in ("a", "b"):
        fleet.start_client(name)
    fleet.start_client("slow", shift=4, steps=50, step_seconds=0.05)
    fleet.wait_for_version(1)
    fleet.kill_server()
    update = fleet.client_folder("slow") / "update.json"
    until(update.exists, "an update on the client's disk")
    fleet.kill_client("slow")
    fleet.start_server(**settings)
    fleet.start_client("slow", trouble="hang")
    until(lambda: history_of(fleet, "slow") == [(0,)], "the update that was left")


@pytest.mark.slow
@pytest.mark.parametrize(
    "rule", [{"rule__name": "fedlf"}, {"rule__name": "adafed", "rule__absent": "history"}]
)
def test_a_float16_history_keeps_a_value_beyond_65504_and_models_stay_finite_over_restarts(
    fleet: Fleet, rule: dict[str, str]
) -> None:
    settings = {"rounds": 10_000, **rule, **SOON, "history__precision": "float16"}
    fleet.init()
    fleet.start_server(**settings)
    send_updates(fleet, {"a": 0.5, "b": 1.5, "large": 1e6})
    fleet.wait_for_version(1)
    for number in (1, 2):  # from this round on, the client large is absent
        fleet.kill_server()
        fleet.start_server(**(settings | {"round__minimum_clients": 2}))
        send_updates(fleet, {"a": 0.5, "b": 1.5})
        fleet.wait_for_version(number + 1)
        assert np.isfinite(fleet.model(number + 1).parameters).all()
    assert "large" in fleet.records()[1]["diagnostics"]["history_coefficients"]
    values, exponent = read_scaled_row(fleet.state / "history" / "large@0.npy")
    assert values.dtype == np.float16
    np.testing.assert_allclose(ScaledRow(values, exponent).decoded(), 1e6, rtol=2.0**-11)
    assert "cannot be aggregated" not in fleet.log("server.log")
    assert fleet.stop_server() == 0
    checked = fleet.run("server", "--check", "--state-dir", str(fleet.state))
    assert checked.returncode == 0, checked.stderr


def send_updates(fleet: Fleet, values: dict[str, float]) -> None:
    """Send updates that move every parameter by the client's value, for the current round."""
    devices = {name: Device(fleet.address, name) for name in values}
    for device in devices.values():
        device.join()
    for name, device in devices.items():
        device.train_task()
        chunks, encoded = device.encode(values[name])
        assert device.send(device.open(encoded).upload, chunks).outcome == pb.OUTCOME_COUNTED


def history_of(fleet: Fleet, client: str) -> list[tuple[int]]:
    return fleet.query(f"select round from history where client = '{client}'")


def rows_of(fleet: Fleet) -> list[Path]:
    return sorted((fleet.state / "history").glob("*.npy"))
