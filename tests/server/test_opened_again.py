"""A client that opens its update again, while an earlier stream of it comes through, loses nothing by it."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fairfleet.client.last_update import Turn
from fairfleet.common.codecs import codec_named
from fairfleet.common.stream import Encoded, encode, update_pieces
from fairfleet.common.tensors import Vector
from fairfleet.server.bases import Bases
from fairfleet.server.sessions import Member
from fairfleet.server.uploads import Announced, Upload
from tests.server.test_coordinator import REPORT, Server, model, serving, soon, update_of

CODEC = "topk:0.1"
BOTH = {"minimum_clients": 2, "evaluate_every": 0, "quorum": 1.0}


class Kept:
    """What a client would keep of its update, to tell the next one by."""

    digest = b""

    def add(self, values: Vector) -> None:
        self.values = np.array(values)


def predicted_update(value: float, base: Vector | None = None) -> tuple[Encoded, list[bytes], Vector]:
    trained, messages, kept = model(), list[bytes](), Kept()
    trained.parameters[:] = -value * np.arange(1, 11)
    pieces = update_pieces(model(), trained, codec_named(CODEC), 0, Turn(base, kept))  # type: ignore[arg-type]
    encoded = encode(pieces, lambda head, data: messages.append(b"".join((head, data))))
    return encoded, messages, kept.values


def announced(client: str, number: int, encoded: Encoded, base: bytes = b"") -> Announced:
    return Announced(client, number, CODEC, encoded.size_bytes, encoded.digest, REPORT, base=base)


async def sent_first(server: Server, *clients: str) -> dict[str, tuple[bytes, Vector]]:
    """Everybody's updates of round 0, by digest and as they are told: the next are told by these."""
    coordinator, first = server.coordinator, {}
    for client in clients:
        member = Member(client, client, "", 10, 10, ("raw32", "topk"), predicts=True)
        server.sessions[client] = await coordinator.join(member)
    await server.until(lambda: coordinator.doing(clients[0]) == "train")
    for place, client in enumerate(clients):
        first[client] = await sent(server, client, 0, 1.0 + place)
    await server.until(lambda: coordinator.publication.version == 1 and coordinator.doing(clients[0]) == "train")
    return first


async def sent(server: Server, client: str, number: int, value: float) -> tuple[bytes, Vector]:
    encoded, messages, told = predicted_update(value)
    reception, digest = server.coordinator.uploads, server.coordinator.publication.digest
    upload = await reception.open(announced(client, number, encoded), digest)
    assert isinstance(upload, Upload)
    assert (await reception.complete(upload, upload.token, messages)).counted
    return encoded.digest, told


class SlowBases:
    """Lets a base be read only when it is told to."""

    def __init__(self, bases: Bases, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked, self.go = threading.Event(), threading.Event()
        read = bases.read

        def slowly(*given: Any) -> Vector:
            self.asked.set()
            self.go.wait(10)
            return read(*given)

        monkeypatch.setattr(bases, "read", slowly)


def test_an_update_that_came_through_while_its_base_is_read_again_stays_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async with serving(tmp_path, codec=CODEC, durability="update", round=BOTH) as server:
            base, told = (await sent_first(server, "a", "b"))["a"]
            coordinator, reception = server.coordinator, server.coordinator.uploads
            encoded, messages, _ = predicted_update(1.5, told)
            wanted = announced("a", 1, encoded, base)
            upload = await reception.open(wanted, coordinator.publication.digest)
            assert isinstance(upload, Upload)
            server.store.hold()
            other = asyncio.ensure_future(coordinator.pause())  # so the upload waits for a transaction
            await server.store.held()
            first = asyncio.ensure_future(reception.complete(upload, upload.token, messages))
            bases = SlowBases(coordinator.bases, monkeypatch)
            again = asyncio.ensure_future(reception.open(wanted, coordinator.publication.digest))
            await asyncio.to_thread(bases.asked.wait, 10)
            server.store.free.set()
            receipt = await first
            bases.go.set()
            assert receipt.counted
            assert await again == receipt
            await other
            (stored,) = server.store.updates_of(1)
            assert stored.file
            assert (tmp_path / stored.file).exists()

    asyncio.run(scenario())


def test_an_update_whose_round_is_committed_while_its_base_is_read_is_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        rule = {"name": "fedfv", "tau": 5}
        async with serving(tmp_path, codec=CODEC, rule=rule, durability="update", **soon()) as server:
            base, told = (await sent_first(server, "a", "b", "c"))["a"]
            coordinator, reception = server.coordinator, server.coordinator.uploads
            encoded, _, _ = predicted_update(7.0, told)
            bases = SlowBases(coordinator.bases, monkeypatch)
            wanted, digest = announced("a", 1, encoded, base), coordinator.publication.digest
            late = asyncio.ensure_future(reception.open(wanted, digest))
            await asyncio.to_thread(bases.asked.wait, 10)
            for client in "bc":
                await sent(server, client, 1, 4.0)
            await server.until(lambda: coordinator.publication.version == 2)
            bases.go.set()
            upload = await late
            assert isinstance(upload, Upload)
            assert upload.path is None, "nothing would ever remove its file"

    asyncio.run(scenario())


def test_an_update_that_came_through_while_it_is_opened_again_stays_on_the_disk(
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
            await server.until(lambda: server.coordinator.doing("a") == "train")
            reception = server.coordinator.uploads
            upload = await server.open("a", 0)
            assert isinstance(upload, Upload)
            upload.finish(upload.token, update_of("a", 0)[1])  # on the disk; what is left is to be recorded
            monkeypatch.setattr(Upload, "opens_at_once", False)  # as where the first stream is still at its fsync
            monkeypatch.setattr(Upload, "reopen", slowly)
            again = asyncio.ensure_future(server.open("a", 0))
            await asyncio.to_thread(opened_again.wait, 10)
            receipt = await reception._arrive(upload)
            came_through.set()
            assert receipt.counted
            assert await again == receipt
            await reception._intake.cleared_away()
            (stored,) = server.store.updates_of(0)
            assert stored.file
            assert (tmp_path / stored.file).exists()

    asyncio.run(scenario())
