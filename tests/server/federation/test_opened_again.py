"""An update that is opened again while an earlier stream completes it is not lost."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fairfleet.client.update.prediction_base import Prediction
from fairfleet.common.chunk_stream import EncodedStream, encode, update_pieces
from fairfleet.common.codecs import codec_named
from fairfleet.common.tensors import Vector
from fairfleet.server.federation.clients.sessions import ClientDescription
from fairfleet.server.transfer.prediction_bases import PredictionBases
from fairfleet.server.transfer.upload import AnnouncedUpdate, Upload
from tests.support.coordinator_server import (
    REPORT,
    Server,
    model,
    serving,
    short_deadlines,
    update_of,
)

CODEC = "topk:0.1"
BOTH = {"minimum_clients": 2, "evaluate_every": 0, "quorum": 1.0}


class Kept:
    """Return what a client keeps of its update as the base of the next one."""

    digest = b""

    def add(self, values: Vector) -> None:
        self.values = np.array(values)


def predicted_update(
    value: float, base: Vector | None = None
) -> tuple[EncodedStream, list[bytes], Vector]:
    trained, messages, decoded_row = model(), list[bytes](), Kept()
    trained.parameters[:] = -value * np.arange(1, 11)
    pieces = update_pieces(model(), trained, codec_named(CODEC), 0, Prediction(base, decoded_row))  # type: ignore[arg-type]
    encoded = encode(pieces, lambda head, data: messages.append(b"".join((head, data))))
    return encoded, messages, decoded_row.values


def announced(
    client: str, number: int, encoded: EncodedStream, base: bytes = b""
) -> AnnouncedUpdate:
    return AnnouncedUpdate(
        client, number, CODEC, encoded.size_bytes, encoded.digest, REPORT, base=base
    )


async def sent_first(server: Server, *clients: str) -> dict[str, tuple[bytes, Vector]]:
    """Send all updates of round 0; return their digests and decoded rows, the bases of the next."""
    coordinator, first = server.coordinator, {}
    for client in clients:
        member = ClientDescription(client, client, "", 10, 10, ("raw32", "topk"), predicts=True)
        server.sessions[client] = await coordinator.clients.join(member)
    await server.until(lambda: coordinator.state.activity(clients[0]) == "train")
    for place, client in enumerate(clients):
        first[client] = await sent(server, client, 0, 1.0 + place)
    await server.until(
        lambda: (
            coordinator.state.publication.version == 1
            and coordinator.state.activity(clients[0]) == "train"
        )
    )
    return first


async def sent(server: Server, client: str, number: int, value: float) -> tuple[bytes, Vector]:
    encoded, messages, decoded = predicted_update(value)
    receiver, digest = (
        server.coordinator.update_receiver,
        server.coordinator.state.publication.digest,
    )
    upload = await receiver.open(announced(client, number, encoded), digest)
    assert isinstance(upload, Upload)
    assert (await receiver.complete(upload, upload.token, messages)).counted
    return encoded.digest, decoded


class SlowBases:
    """A store that reads a base only when the test allows it."""

    def __init__(self, bases: PredictionBases, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked, self.go = threading.Event(), threading.Event()
        read = bases.read

        def slowly(*args: Any) -> Vector:
            self.asked.set()
            self.go.wait(10)
            return read(*args)

        monkeypatch.setattr(bases, "read", slowly)


def test_an_update_that_completes_while_its_base_is_read_again_stays_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async with serving(tmp_path, codec=CODEC, durability="update", round=BOTH) as server:
            base, decoded = (await sent_first(server, "a", "b"))["a"]
            coordinator, receiver = server.coordinator, server.coordinator.update_receiver
            encoded, messages, _ = predicted_update(1.5, decoded)
            announcement = announced("a", 1, encoded, base)
            upload = await receiver.open(announcement, coordinator.state.publication.digest)
            assert isinstance(upload, Upload)
            server.store.block()
            pausing = asyncio.ensure_future(
                coordinator.operators.pause()
            )  # The upload waits for a transaction.
            await server.store.wait_until_blocked()
            first = asyncio.ensure_future(receiver.complete(upload, upload.token, messages))
            bases = SlowBases(coordinator.runner.upload_registry.bases, monkeypatch)
            again = asyncio.ensure_future(
                receiver.open(announcement, coordinator.state.publication.digest)
            )
            await asyncio.to_thread(bases.asked.wait, 10)
            server.store.free.set()
            receipt = await first
            bases.go.set()
            assert receipt.counted
            assert await again == receipt
            await pausing
            (stored,) = server.store.updates_of(1)
            assert stored.file
            assert (tmp_path / stored.file).exists()

    asyncio.run(scenario())


def test_an_update_whose_round_is_committed_while_its_base_is_read_is_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        rule = {"name": "fedfv", "tau": 5}
        async with serving(
            tmp_path, codec=CODEC, rule=rule, durability="update", **short_deadlines()
        ) as server:
            base, decoded = (await sent_first(server, "a", "b", "c"))["a"]
            coordinator, receiver = server.coordinator, server.coordinator.update_receiver
            encoded, _, _ = predicted_update(7.0, decoded)
            bases = SlowBases(coordinator.runner.upload_registry.bases, monkeypatch)
            announcement, digest = (
                announced("a", 1, encoded, base),
                coordinator.state.publication.digest,
            )
            late = asyncio.ensure_future(receiver.open(announcement, digest))
            await asyncio.to_thread(bases.asked.wait, 10)
            for client in "bc":
                await sent(server, client, 1, 4.0)
            await server.until(lambda: coordinator.state.publication.version == 2)
            bases.go.set()
            upload = await late
            assert isinstance(upload, Upload)
            assert upload.path is None, "nothing would ever remove its file"

    asyncio.run(scenario())


def test_an_update_that_completes_while_it_is_opened_again_stays_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        opened_again, came_through = threading.Event(), threading.Event()
        reopen = Upload.reopen

        def slowly(upload: Upload) -> bytes:
            token = reopen(upload)
            opened_again.set()
            came_through.wait(10)
            return token

        async with serving(tmp_path, codec="raw32", durability="update", round=BOTH) as server:
            await server.join("a", "b")
            await server.until(lambda: server.coordinator.state.activity("a") == "train")
            receiver = server.coordinator.update_receiver
            upload = await server.open("a", 0)
            assert isinstance(upload, Upload)
            upload.finish(
                upload.token, update_of("a", 0)[1]
            )  # The update is on the disk, but not recorded yet.
            monkeypatch.setattr(
                Upload, "opens_at_once", False
            )  # This is as if the first stream were still in its fsync.
            monkeypatch.setattr(Upload, "reopen", slowly)
            again = asyncio.ensure_future(server.open("a", 0))
            await asyncio.to_thread(opened_again.wait, 10)
            receipt = await receiver._arrive(upload)
            came_through.set()
            assert receipt.counted
            assert await again == receipt
            await server.coordinator.runner.upload_registry.cleared_away()
            (stored,) = server.store.updates_of(0)
            assert stored.file
            assert (tmp_path / stored.file).exists()

    asyncio.run(scenario())
