"""The content that an upload may have, and that no chunk which has arrived is lost."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import grpc
import numpy as np
import pytest

from fairfleet.proto.v1 import fleet_pb2 as pb
from fairfleet.proto.v1.model_pb2 import Chunk
from fairfleet.server.storage.files.checksummed_arrays import read_scaled_row, save_scaled_row
from tests.support.device import REPORT, Device
from tests.support.fleet import Fleet, free_port, until
from tests.support.refusals import refused
from tests.support.scraping import scrape, series

Code = grpc.StatusCode
ALONE: dict[str, Any] = {"round__minimum_clients": 1, "lease_seconds": 60}
UNKNOWN_FIELD = bytes([0x9A, 0x06])  # field 99, length-delimited


def selected(fleet: Fleet, name: str, **join: Any) -> Device:
    """Return a client with a training task."""
    device = Device(fleet.address, name)
    device.join(**join)
    device.train_task()
    return device


def padded(chunk: Chunk, size: int) -> bytes:
    """Return a chunk with an unknown field of this many bytes."""
    length, digits = size, bytearray()
    while length > 127:
        digits.append(length & 127 | 128)
        length >>= 7
    return chunk.SerializeToString() + UNKNOWN_FIELD + bytes([*digits, length]) + bytes(size)


def test_a_chunk_with_padding_is_refused_and_does_not_affect_a_restart(fleet: Fleet) -> None:
    fleet.init()
    fleet.start_server(rounds=2, **ALONE)
    device = selected(fleet, "eve")
    chunks, encoded = device.encode()
    upload = device.open(encoded).upload
    messages = [padded(chunk, 2_200_000 if not index else 0) for index, chunk in enumerate(chunks)]
    with refused(Code.INVALID_ARGUMENT, "a chunk message has", "at most"):
        device.send_raw(upload, messages)
    fleet.kill_server()
    fleet.start_server(rounds=2, **ALONE)
    again = selected(fleet, "eve")
    receipt = again.send(again.open(encoded).upload, chunks)
    assert receipt.outcome == pb.OUTCOME_COUNTED


@pytest.mark.parametrize("count", [1, 2, 3])
def test_chunks_are_stored_when_a_client_returns_before_its_old_stream_ends(
    fleet: Fleet, count: int
) -> None:
    fleet.init(1_000_000)
    fleet.start_server(rounds=1, **ALONE)
    device = selected(fleet, "device")
    chunks, encoded = device.encode()
    assert len(chunks) > count
    upload, sent, over = device.open(encoded).upload, threading.Event(), threading.Event()

    def stream() -> Iterator[Chunk]:
        yield from chunks[:count]
        sent.set()
        over.wait(60)

    metadata = (("fairfleet-upload-bin", upload),)
    call = device.stub.SendUpload.future(stream(), metadata=metadata, timeout=60)
    assert sent.wait(20)
    over.wait(1.0)  # a pause: all chunks have arrived
    reconnected = Device(fleet.address, "device", fleet.channel())
    reconnected.session, reconnected.task = device.session, device.task
    offset = reconnected.open(encoded).offset_bytes
    assert offset == sum(len(chunk.data) for chunk in chunks[:count])
    over.set()
    call.cancel()


def test_an_update_without_steps_is_refused_in_a_lossy_codec_too(fleet: Fleet) -> None:
    fleet.init()
    fleet.start_server(rounds=1, codec="int8", **ALONE)
    device = selected(fleet, "eve", codecs=["int8", "raw32"])
    chunks, encoded = device.encode(codec="int8")
    report = pb.TrainReport()
    report.CopyFrom(REPORT)
    report.steps = 0
    upload = device.open(encoded, codec="int8", report=report).upload
    with refused(Code.INVALID_ARGUMENT, "steps is 0"):
        device.send(upload, chunks)


@pytest.mark.parametrize("codec", ["int8", "auto"])
def test_the_codec_is_enforced_in_the_first_round_of_a_federation(fleet: Fleet, codec: str) -> None:
    fleet.init()
    fleet.start_server(rounds=1, codec=codec, **ALONE)
    device = selected(fleet, "eve", codecs=["int8", "raw32", "bf16", "fp16"])
    named, task = device.task.codec, device.task
    device.join(codecs=["raw32", "bf16", "fp16"])
    device.task = task
    for another_codec in {"raw32", "bf16"} - {named}:
        _, encoded = device.encode(codec=another_codec)
        with refused(Code.INVALID_ARGUMENT, f"is in codec {another_codec}"):
            device.open(encoded, codec=another_codec)


def test_a_refused_announcement_is_counted_and_logged(fleet: Fleet) -> None:
    port = free_port()
    fleet.init()
    fleet.start_server(
        rounds=1,
        round__minimum_clients=2,
        round__clients=2,
        lease_seconds=60,
        http__port=port,
    )
    first, second = Device(fleet.address, "ann"), Device(fleet.address, "bob")
    first.join()
    second.join()
    first.train_task()
    eve = Device(fleet.address, "eve")
    eve.join()
    eve.task = first.task
    _, encoded = eve.encode()
    with refused(Code.FAILED_PRECONDITION, "client eve was not"):
        eve.open(encoded)
    until(lambda: "update of eve" in fleet.log("server.log"), "the refusal in the log")
    assert scrape(port)[series("fairfleet_updates_total", outcome="refused")] == 1


def test_a_history_row_that_is_not_finite_is_ignored(fleet: Fleet) -> None:
    settings = {"rule__name": "fedfv", "rule__tau": 5, "history__precision": "float16"}
    fleet.init()
    fleet.start_server(rounds=1000, round__minimum_clients=2, **settings)
    for name in ("a", "b"):
        fleet.start_client(name, shift=1, steps=1, step_seconds=0.1)
    fleet.wait_for_version(2)
    fleet.kill_server()
    ((number,),) = fleet.query("select round from history where client = 'a'")
    file = fleet.state / "history" / f"a@{number}.npy"
    row, exponent = read_scaled_row(file)
    save_scaled_row(file, np.full_like(row, np.inf), exponent)
    fleet.start_server(rounds=1000, round__minimum_clients=2, **settings)
    version = fleet.version() + 2
    fleet.wait_for_version(version)
    assert np.isfinite(fleet.model(version).parameters).all()
    assert f"a@{number}.npy is not finite" in fleet.log("server.log")
