"""A model may be sent before its task, while it is being committed; the task never is."""

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

from fairfleet.common.chunk_stream import Decoder
from fairfleet.common.codecs import RAW32
from fairfleet.common.tensors import Model
from fairfleet.proto.v1 import fleet_pb2 as pb
from fairfleet.proto.v1.model_pb2 import Chunk
from tests.support.device import Device, read_task
from tests.support.fleet import Fleet
from tests.support.refusals import refused
from tests.support.relay import Relay, RelayedFleet

SIZE, CHUNKS = 600_000, 5  # three chunks of parameters, one of buffers and one of counters


@contextlib.contextmanager
def a_disk_that_hangs(fleet: Fleet) -> Iterator[None]:
    """Hold the database's lock, so that every transaction waits as on a disk that hangs."""
    with contextlib.closing(
        sqlite3.connect(fleet.state / "federation.db", isolation_level=None)
    ) as database:
        database.execute("BEGIN IMMEDIATE")
        yield


def two_devices(fleet: Fleet) -> list[Device]:
    """Return two devices in round 0 whose updates are not sent yet."""
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
    """Return settings that keep updates in memory, so the first transaction is the commit."""
    fleet.init(SIZE)
    fleet.start_server(rounds=10, round__minimum_clients=2, durability="round", lease_seconds=60)
    return fleet


def test_the_model_comes_with_its_task_unless_the_client_has_it(training: Fleet) -> None:
    device = two_devices(training)[0]
    chunks, answer = device.take_task()
    assert answer.train.id == device.task.id
    fetched = pb.FetchModelRequest(session=device.session, version=0)
    assert chunks == list(device.stub.FetchModel(fetched))
    assert len(chunks) == CHUNKS
    again, same = device.take_task(cached_digest=answer.train.model.digest)
    assert (again, same.train.id) == ([], answer.train.id)


def test_a_model_is_sent_while_it_is_committed_and_its_task_afterwards(training: Fleet) -> None:
    devices = two_devices(training)
    with a_disk_that_hangs(training):
        assert not any(send(device).durable for device in devices)
        calls = [
            device.stub.TakeTask(pb.TakeTaskRequest(session=device.session), timeout=40)
            for device in devices
        ]
        came = [[next(call) for _ in range(CHUNKS)] for call in calls]
        assert training.status().version == training.version() == 0  # also for operators
    for device, call, chunks in zip(devices, calls, came, strict=True):
        rest, answer = read_task(call)
        assert (rest, answer.train.round) == ([], 1)
        assert training.version() == 1
        sent = model_of(device, chunks, answer.train.model.digest)
        np.testing.assert_array_equal(sent.parameters, training.model(1).parameters)


@pytest.mark.parametrize("durability", ["update", "round"])
def test_a_server_that_dies_before_the_commit_has_given_no_task_for_the_sent_model(
    fleet: Fleet, durability: str
) -> None:
    settings = {
        "rounds": 10,
        "round__minimum_clients": 2,
        "durability": durability,
        "lease_seconds": 60,
    }
    fleet.init(SIZE)
    fleet.start_server(**settings)
    devices = two_devices(fleet)
    os.mkfifo(fleet.state / "models" / "00000001.safetensors.new")  # like a file on a full disk
    for device in devices:
        send(device)
    calls = [
        device.stub.TakeTask(pb.TakeTaskRequest(session=device.session), timeout=40)
        for device in devices
    ]
    came = [[next(call) for _ in range(CHUNKS)] for call in calls]
    fleet.kill_server()
    for call in calls:
        with pytest.raises(grpc.RpcError):
            next(call)
    assert fleet.version() == 0
    fleet.start_server(**settings)
    for device in devices:
        device.join()
    if durability == "round":  # updates that were only in memory are requested again
        for device in devices:
            assert device.train_task().round == 0
            with refused(grpc.StatusCode.FAILED_PRECONDITION, "round 2 is not known here"):
                device.open(device.encode()[1], round=1)
            send(device)
    for device, before in zip(devices, came, strict=True):
        chunks, answer = device.take_task()
        assert answer.train.round == 1
        assert chunks == before  # equal updates give an equal model
    assert fleet.version() == 1


@pytest.mark.slow
def test_a_model_arrives_over_a_link_that_breaks_before_a_model_is_complete(tmp_path: Path) -> None:
    """An interrupted poll starts at the first chunk, so the rest is fetched in separate calls."""
    fleet = RelayedFleet(tmp_path)
    try:
        fleet.init(2_500_000)
        fleet.start_server(rounds=2, round__minimum_clients=1, durability="round", lease_seconds=60)
        fleet.relay = Relay(fleet.port, break_after_bytes=4_000_000)  # the model has 10 MB
        fleet.start_client("far")
        fleet.wait_for_version(2)
        assert fleet.relay.breaks >= 4  # two for each model
        fleet.relay.cut()
    finally:
        fleet.end()


@pytest.mark.slow
def test_no_model_is_sent_ahead_if_a_release_must_be_recorded_first(fleet: Fleet) -> None:
    fleet.init(SIZE, task="plain")
    private: dict[str, Any] = {
        "privacy__where": "server",
        "privacy__clip": 1.0,
        "privacy__noise_multiplier": 1.0,
    }
    private["rule__weighting"] = "uniform"
    fleet.start_server(
        rounds=10, round__minimum_clients=2, durability="round", lease_seconds=60, **private
    )
    devices = two_devices(fleet)
    os.mkfifo(fleet.state / "models" / "00000001.safetensors.new")
    for device in devices:
        send(device)
    calls = [
        device.stub.TakeTask(pb.TakeTaskRequest(session=device.session), timeout=2)
        for device in devices
    ]
    for call in calls:
        with refused(grpc.StatusCode.DEADLINE_EXCEEDED):
            next(call)
    assert fleet.version() == 0
