"""A round has one codec and one receipt for each client, and no restart loses an honest update."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import grpc
import pytest

from fairfleet.client.agent.agent import Agent
from fairfleet.client.task import Job, Trained
from fairfleet.common.codecs import ABILITIES
from fairfleet.common.net.server_access import ServerAccess
from fairfleet.common.tensors import Arrays
from fairfleet.common.wire import ERROR_METADATA
from fairfleet.proto.v1 import fleet_pb2 as pb
from tests.support.device import Device
from tests.support.fleet import Fleet, free_port, until
from tests.support.refusals import refused
from tests.support.scraping import scrape, series
from tests.support.tasks import shift

pytestmark = pytest.mark.slow

Code = grpc.StatusCode
ALONE: dict[str, Any] = {"round__minimum_clients": 1, "lease_seconds": 20}


def joined(fleet: Fleet, *names: str, codecs: tuple[str, ...] = ABILITIES) -> list[Device]:
    """Return clients that each have a task of the same round."""
    devices = [Device(fleet.address, name, fleet.channel()) for name in names]
    for device in devices:
        device.join(codecs=codecs)
    for device in devices:
        device.train_task()
    return devices


def back(fleet: Fleet, device: Device) -> Device:
    """Return the same client with its task, after a restart of the server."""
    device.channel.close()
    again = Device(fleet.address, device.name, fleet.channel())
    again.task = device.task
    again.join(codecs=ABILITIES)
    return again


def deliver(device: Device, codec: str) -> pb.Receipt:
    chunks, encoded = device.encode(codec=codec)
    return device.send(device.open(encoded, codec=codec).upload, chunks)


def codecs_of(fleet: Fleet, client: str) -> list[tuple[int, str]]:
    return fleet.query(f"select round, codec from updates where client = '{client}' order by round")


# ---- updates in another codec ------------------------------------------------------------------


def test_an_update_in_another_codec_than_the_task_named_is_refused(fleet: Fleet) -> None:
    fleet.init()
    fleet.start_server(codec="int8", **ALONE)
    (device,) = joined(fleet, "ann", codecs=("int8", "raw32", "topk", "zstd"))
    assert device.task.codec == "int8"
    for codec in ("raw32", "fp16", "int8+zstd", "topk:0.1"):
        chunks, encoded = device.encode(codec=codec)
        words = (f"is in codec {codec}", "its task named int8", "TrainTask.codec")
        with refused(Code.INVALID_ARGUMENT, *words):
            device.open(encoded, codec=codec)
        with refused(Code.INVALID_ARGUMENT, *words):
            device.open_and_send(
                device.announcement(encoded, codec=codec).SerializeToString(), chunks
            )
    assert deliver(device, "int8").outcome == pb.OUTCOME_COUNTED
    assert codecs_of(fleet, "ann") == [(0, "int8")]
    device.channel.close()


def test_the_refusal_is_counted_and_logged_once_per_client_and_round(fleet: Fleet) -> None:
    fleet.init()
    port = free_port()
    fleet.start_server(codec="int8", http__port=port, **ALONE)
    (device,) = joined(fleet, "ann")
    for _ in range(5):
        with refused(Code.INVALID_ARGUMENT):
            device.open(device.encode()[1])
    assert scrape(port)[series("fairfleet_updates_total", outcome="refused")] == 5
    assert fleet.log("server.log").count("an update of ann was refused") == 1
    device.channel.close()


def test_auto_chooses_one_codec_and_no_other_is_accepted(fleet: Fleet) -> None:
    fleet.init()
    fleet.start_server(codec="auto", **ALONE)
    (device,) = joined(fleet, "ann")
    deliver(device, "int8")
    device.train_task()  # a task of the next round, which began in this run of the server
    assert (device.task.round, device.task.codec) == (1, "int8")
    with refused(Code.INVALID_ARGUMENT, "is in codec bf16; its task named int8"):
        device.open(device.encode(codec="bf16")[1], codec="bf16")
    assert device.take_task()[1].train.codec == device.next_task().train.codec == "int8"
    device.channel.close()


# ---- over restarts -----------------------------------------------------------------------------


def test_after_a_restart_the_settings_determine_the_same_codec(fleet: Fleet) -> None:
    fleet.init()
    fleet.start_server(codec="int8", **ALONE)
    (device,) = joined(fleet, "ann")
    fleet.kill_server()
    fleet.start_server(codec="int8", **ALONE)
    device = back(fleet, device)
    with refused(Code.INVALID_ARGUMENT, "its task named int8"):
        device.open(device.encode()[1])
    assert (
        deliver(device, "int8").outcome == pb.OUTCOME_COUNTED
    )  # although it never requested the task from this server
    device.channel.close()


@pytest.mark.parametrize("codec", ["bf16", "topk:0.01"])
def test_a_codec_chosen_by_auto_before_a_restart_is_accepted_after_it(
    fleet: Fleet, codec: str
) -> None:
    """The server no longer knows the client's uplink rate and would now choose another codec."""
    fleet.init()
    fleet.start_server(codec="auto", **ALONE)
    (device,) = joined(fleet, "ann")
    fleet.kill_server()
    fleet.start_server(codec="auto", **ALONE)
    device = back(fleet, device)
    assert device.train_task().codec == "int8"
    with refused(Code.INVALID_ARGUMENT, "is in codec raw32"):
        device.open(device.encode()[1])
    assert deliver(device, codec).outcome == pb.OUTCOME_COUNTED
    device.channel.close()


def test_an_open_upload_continues_after_a_restart_with_another_codec(fleet: Fleet) -> None:
    fleet.init(3_000_000)
    fleet.start_server(codec="int8", **ALONE)
    (device,) = joined(fleet, "ann")
    chunks, encoded = device.encode(codec="int8")
    with pytest.raises(grpc.RpcError):
        device.send(device.open(encoded, codec="int8").upload, chunks[:2])
    fleet.kill_server()
    fleet.start_server(codec="topk:0.1", **ALONE)
    device = back(fleet, device)
    assert device.train_task().codec == "topk:0.1"
    opened = device.open(encoded, codec="int8")
    assert opened.offset_bytes > 0
    rest = [chunk for chunk in chunks if chunk.offset_bytes >= opened.offset_bytes]
    assert device.send(opened.upload, rest).outcome == pb.OUTCOME_COUNTED
    device.train_task()
    with refused(Code.INVALID_ARGUMENT, "is in codec int8; its task named topk:0.1"):
        device.open(device.encode(codec="int8")[1], codec="int8")
    device.channel.close()


@pytest.mark.slow
def test_a_late_update_must_have_the_codec_of_its_own_round(fleet: Fleet) -> None:
    fleet.init()
    soon = {
        "round__deadline_seconds": 1.5,
        "round__quorum": 0.5,
        "round__minimum_clients": 2,
        "lease_seconds": 60,
    }
    settings = {"codec": "int8", "rule__name": "fedfv", "rule__tau": 20, "rounds": 1000} | soon
    fleet.start_server(**settings)
    late, other = joined(fleet, "late", "other")
    deliver(other, "int8")
    fleet.wait_for_version(1)
    with refused(Code.INVALID_ARGUMENT, "for round 1 is in codec raw32; its task named int8"):
        late.open(late.encode()[1])
    fleet.kill_server()
    fleet.start_server(**(settings | {"codec": "bf16"}))
    late = back(fleet, late)
    assert deliver(late, "int8").outcome == pb.OUTCOME_HISTORY
    for device in (late, other):
        device.channel.close()


@pytest.mark.slow
@pytest.mark.parametrize("client_is_killed_too", [False, True])
def test_a_real_client_delivers_what_it_encoded_before_the_settings_changed(
    fleet: Fleet, client_is_killed_too: bool
) -> None:
    fleet.init()
    fleet.start_server(rounds=3, codec="int8", **ALONE)
    fleet.start_client("ann", steps=2, step_seconds=0.5)
    until(
        lambda: fleet.query("select event from journal where event like '%ClientsChosen%'"),
        "a task to be given",
    )
    until(lambda: fleet.status().bytes_sent > 0, "the task's model to be sent")
    time.sleep(0.3)  # the task follows its model at once; the training takes longer
    fleet.kill_server()
    if client_is_killed_too:
        until(
            lambda: list((fleet.folder / "clients").glob("**/update.json")),
            "the update on the client's disk",
        )
        fleet.kill_client("ann")
    fleet.start_server(rounds=3, codec="topk:0.1", exit_when_finished=True, **ALONE)
    if client_is_killed_too:
        fleet.start_client("ann", steps=2, step_seconds=0.1)
    assert fleet.wait_clients() == {"ann": 0}
    assert codecs_of(fleet, "ann") == [(0, "int8"), (1, "topk:0.1"), (2, "topk:0.1")]
    assert "given up" not in fleet.log("ann.log")


# ---- one receipt for a client and round --------------------------------------------------------


def test_after_a_receipt_another_update_for_the_round_is_refused_in_both_ways(fleet: Fleet) -> None:
    fleet.init()
    fleet.start_server(round__minimum_clients=2, round__quorum=1.0)
    ann, other = joined(fleet, "ann", "other")
    chunks, first = ann.encode(1.0)
    receipt = ann.send(ann.open(first).upload, chunks)
    chunks, second = ann.encode(2.0)
    names = (first.digest.hex()[:16], second.digest.hex()[:16])
    calls = (
        lambda: ann.open(second),
        lambda: ann.open_and_send(ann.announcement(second).SerializeToString(), chunks),
    )
    for call in calls:
        with pytest.raises(grpc.RpcError) as caught:
            call()
        error: Any = caught.value
        assert error.code() is Code.FAILED_PRECONDITION
        assert "{}… counts, {}… is refused".format(*names) in error.details()
        metadata = dict(error.trailing_metadata())
        assert metadata["fairfleet-standing-bin"] == first.digest
        assert metadata[ERROR_METADATA] == "AnotherUpdateCounts"
    assert ann.open(first).receipt == receipt
    deliver(other, "raw32")
    fleet.wait_for_version(1)
    with refused(Code.FAILED_PRECONDITION, "is refused"):  # the same holds after the round
        ann.open(second)
    assert ann.open(first).receipt == receipt
    for device in (ann, other):
        device.channel.close()


def test_a_client_may_send_another_update_if_the_server_lost_the_first(fleet: Fleet) -> None:
    fleet.init()
    settings = {
        "durability": "round",
        "round__minimum_clients": 2,
        "round__quorum": 1.0,
        "lease_seconds": 60,
    }
    fleet.start_server(**settings)
    ann, other = joined(fleet, "ann", "other")
    chunks, first = ann.encode(1.0)
    assert not ann.send(ann.open(first).upload, chunks).durable
    with refused(Code.FAILED_PRECONDITION, "is refused"):
        ann.open(ann.encode(2.0)[1])
    fleet.kill_server()
    fleet.start_server(**settings)
    ann, other = back(fleet, ann), back(fleet, other)
    for device in (ann, other):
        device.train_task()
    chunks, second = ann.encode(2.0)
    assert ann.send(ann.open(second).upload, chunks).digest == second.digest
    deliver(other, "raw32")
    fleet.wait_for_version(1)
    assert fleet.query("select digest from updates where client = 'ann'") == [
        (second.digest.hex(),)
    ]
    for device in (ann, other):
        device.channel.close()


@pytest.mark.slow
def test_a_late_update_has_only_one_receipt_too(fleet: Fleet) -> None:
    fleet.init()
    soon = {
        "round__deadline_seconds": 1.5,
        "round__quorum": 0.5,
        "round__minimum_clients": 2,
        "lease_seconds": 60,
    }
    fleet.start_server(rule__name="fedfv", rule__tau=20, rounds=1000, **soon)
    late, other = joined(fleet, "late", "other")
    deliver(other, "raw32")
    fleet.wait_for_version(1)
    chunks, first = late.encode(1.0)
    receipt = late.send(late.open(first).upload, chunks)
    assert (receipt.outcome, receipt.digest) == (pb.OUTCOME_HISTORY, first.digest)
    assert late.open(first).receipt == receipt
    with refused(Code.FAILED_PRECONDITION, "is refused"):
        late.open(late.encode(2.0)[1])
    for device in (late, other):
        device.channel.close()


@pytest.mark.slow
def test_a_client_whose_disk_was_wiped_after_its_update_counted_joins_the_next_round(
    fleet: Fleet, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It trains the round again. Meanwhile the earlier update arrives, whose receipt was lost."""
    fleet.init()
    fleet.start_server(
        rounds=3,
        round__minimum_clients=2,
        round__quorum=1.0,
        lease_seconds=60,
        exit_when_finished=True,
    )
    fleet.start_client("bob", steps=1, step_seconds=0.5)
    task = shift(size="1000", shift="2", samples="10")
    agent = Agent("ann", task, ServerAccess(fleet.address), tmp_path / "ann")
    earlier, train = Device(fleet.address, "ann", fleet.channel()), task.train

    def train_while_another_update_comes_through(model: Arrays, job: Job) -> Trained:
        if not earlier.session:
            earlier.session, earlier.model = agent._connection.joined.session, task.initial_model()
            earlier.train_task()
            assert deliver(earlier, "raw32").outcome == pb.OUTCOME_COUNTED
        return train(model, job)

    task.train = train_while_another_update_comes_through  # type: ignore[method-assign]
    with caplog.at_level("INFO"):
        assert "rounds" in agent.run()
    assert (
        "the update for round 1 did not count: client ann has the receipt of another update"
        in caplog.text
    )
    assert fleet.wait_clients() == {"bob": 0}
    digests = dict(fleet.query("select round, digest from updates where client = 'ann'"))
    assert sorted(digests) == [0, 1, 2]
    assert digests[0] == earlier.encode()[1].digest.hex()
    earlier.channel.close()
