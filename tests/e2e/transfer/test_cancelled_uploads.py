"""Chunks that arrived before an upload's stream was cancelled are kept."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from fairfleet.proto.v1.model_pb2 import Chunk
from tests.support.device import Device
from tests.support.fleet import Fleet

TRIES = 30
SILENCE_SECONDS = 0.3


@pytest.mark.slow
@pytest.mark.parametrize("durability", ["update", pytest.param("round", marks=pytest.mark.slow)])
def test_no_chunk_that_arrived_is_lost_when_the_stream_is_cancelled(
    tmp_path: Path, durability: str
) -> None:
    fleet = Fleet(tmp_path)
    try:
        fleet.init(600_000)
        fleet.start_server(
            rounds=1, lease_seconds=60, round__minimum_clients=1, durability=durability
        )
        device = Device(fleet.address, "device")
        device.join()
        device.train_task()
        lost = [number for number in range(TRIES) if not keeps_all(device, number)]
        assert lost == []
    finally:
        fleet.end()


def keeps_all(device: Device, number: int) -> bool:
    """Send chunks of an update, pause, cancel, and compare the offset with what was sent."""
    chunks, encoded = device.encode(1.0 + number)
    sent = chunks[: 1 + number % (len(chunks) - 1)]
    upload, silent, over = device.open(encoded).upload, threading.Event(), threading.Event()

    def stream() -> Iterator[Chunk]:
        yield from sent
        silent.set()
        over.wait(30)

    call = device.stub.SendUpload.future(
        stream(), metadata=(("fairfleet-upload-bin", upload),), timeout=30
    )
    assert silent.wait(20)
    over.wait(SILENCE_SECONDS)  # the pause is part of the test: all chunks have arrived by then
    call.cancel()
    over.set()
    with pytest.raises(grpc.FutureCancelledError):
        call.result()
    return device.open(encoded).offset_bytes == sum(len(chunk.data) for chunk in sent)
