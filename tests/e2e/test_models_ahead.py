"""A model may come in front of its task, while it is being committed; the task never does."""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from fairfleet.common.codecs import RAW32
from fairfleet.common.stream import Decoder
from fairfleet.common.tensors import Model
from fairfleet.proto.v1 import fleet_pb2 as pb
from fairfleet.proto.v1.model_pb2 import Chunk
from tests.e2e.device import Device, read_task
from tests.e2e.fleet import Fleet
from tests.e2e.relay import Relay, Relayed
from tests.e2e.test_refusals import refused

SIZE, CHUNKS = 600_000, 5  # three of parameters, and one each of buffers and counters


@contextlib.contextmanager
def a_disk_that_hangs(fleet: Fleet) -> Iterator[None]:
    """Whoever holds the database's lock keeps every transaction waiting, as a disk would that does not answer."""
    with contextlib.closing(sqlite3.connect(fleet.state / "federation.db", isolation_level=None)) as database:
        database.execute("BEGIN IMMEDIATE")
        yield


def two_devices(fleet: Fleet) -> list[Device]:
    """In round 0, with updates that are not sent yet."""
    devices = [Device(fleet.address, name) for name in ("a", "b")]
    for device in devices:
        device.join(protects=True)
    for device in devices:
        device.train_task()
    return devices


def send(device: Device) -> pb.Receipt:
    chunks, encoded = device.encode()
    return device.open_and_send(device.announcement(encoded).SerializeToString(), chunks)


def model_of(device: Device, chunks: list[Chunk], digest: bytes) -> Model:
    decoder = Decoder(Model.empty(device.model.signature), RAW32)
    for chunk in chunks:
        decoder.take(chunk.SerializeToString())
    decoder.finish(digest)
    return decoder.into


@pytest.fixture
def training(fleet: Fleet) -> Fleet:
    """Its updates are in memory: so the first transaction of a round that is trained is its commit."""
    fleet.init(SIZE)
    fleet.start_server(rounds=10, round__minimum_clients=2, durability="round", lease_seconds=60)
    return fleet


def test_the_model_comes_with_its_task_unless_it_is_held(training: Fleet) -> None:
    device = two_devices(training)[0]
    chunks, answer = device.take_task()
    assert answer.train.id == device.task.id
    fetched = pb.FetchModelRequest(session=device.session, version=0)
    assert chunks == list(device.stub.FetchModel(fetched))
    assert len(chunks) == CHUNKS
    again, same = device.take_task(held=answer.train.model.digest)
    assert (again, same.train.id) == ([], answer.train.id)


def test_a_model_is_sent_while_it_is_committed_and_its_task_afterwards(training: Fleet) -> None:
    devices = two_devices(training)
    with a_disk_that_hangs(training):
        assert not any(send(device).durable for device in devices)
        calls = [device.stub.TakeTask(pb.TakeTaskRequest(session=device.session), timeout=40) for device in devices]
        came = [[next(call) for _ in range(CHUNKS)] for call in calls]
        assert training.status().version == training.version() == 0  # for operators, and for good
    for device, call, chunks in zip(devices, calls, came, strict=True):
        rest, answer = read_task(call)
        assert (rest, answer.train.round) == ([], 1)
        assert training.version() == 1
        sent = model_of(device, chunks, answer.train.model.digest)
        np.testing.assert_array_equal(sent.parameters, training.model(1).parameters)


@pytest.mark.parametrize("durability", ["update", "round"])
def test_a_server_that_dies_before_the_commit_has_asked_nobody_about_the_model_that_it_sent(
    fleet: Fleet, durability: str
) -> None:
    settings = {"rounds": 10, "round__minimum_clients": 2, "durability": durability, "lease_seconds": 60}
    fleet.init(SIZE)
    fleet.start_server(**settings)
    devices = two_devices(fleet)
    os.mkfifo(fleet.state / "models" / "00000001.safetensors.new")  # as a file whose disk takes no more
    for device in devices:
        send(device)
    calls = [device.stub.TakeTask(pb.TakeTaskRequest(session=device.session), timeout=40) for device in devices]
    came = [[next(call) for _ in range(CHUNKS)] for call in calls]
    fleet.kill_server()
    for call in calls:
        with pytest.raises(grpc.RpcError):
            next(call)
    assert fleet.version() == 0
    fleet.start_server(**settings)
    for device in devices:
        device.join()
    if durability == "round":  # what was kept in memory is asked for again
        for device in devices:
            assert device.train_task().round == 0
            with refused(grpc.StatusCode.FAILED_PRECONDITION, "round 1 is not known here"):
                device.open(device.encode()[1], round=1)
            send(device)
    for device, before in zip(devices, came, strict=True):
        chunks, answer = device.take_task()
        assert answer.train.round == 1
        assert chunks == before  # the same updates give the same model
    assert fleet.version() == 1


def test_a_link_that_never_lasts_for_a_whole_model_brings_it_all_the_same(tmp_path: Path) -> None:
    """By parts: a poll that broke off begins with the first chunk again, so the rest is fetched from where it broke."""
    fleet = Relayed(tmp_path)
    try:
        fleet.init(2_500_000)
        fleet.start_server(rounds=2, round__minimum_clients=1, durability="round", lease_seconds=60)
        fleet.relay = Relay(fleet.port, lasts_bytes=4_000_000)  # the model has 10 MB
        fleet.start_client("far")
        fleet.wait_for_version(2)
        assert fleet.relay.breaks >= 4  # two for each model
        fleet.relay.cut()
    finally:
        fleet.end()


def test_where_a_release_goes_on_record_first_no_model_goes_ahead(fleet: Fleet) -> None:
    fleet.init(SIZE, task="plain")
    private: dict[str, Any] = {"privacy__where": "server", "privacy__clip": 1.0, "privacy__noise_multiplier": 1.0}
    private["rule__weighting"] = "uniform"
    fleet.start_server(rounds=10, round__minimum_clients=2, durability="round", lease_seconds=60, **private)
    devices = two_devices(fleet)
    os.mkfifo(fleet.state / "models" / "00000001.safetensors.new")
    for device in devices:
        send(device)
    calls = [device.stub.TakeTask(pb.TakeTaskRequest(session=device.session), timeout=2) for device in devices]
    for call in calls:
        with refused(grpc.StatusCode.DEADLINE_EXCEEDED):
            next(call)
    assert fleet.version() == 0
