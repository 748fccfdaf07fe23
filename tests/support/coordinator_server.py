"""A coordinator with its own store, without gRPC, whose disk can be blocked."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np

from fairfleet.common.chunk_stream import EncodedStream, encode, model_pieces
from fairfleet.common.reports import TrainReport
from fairfleet.common.tensors import Model
from fairfleet.server.federation.clients.sessions import ClientDescription, Session
from fairfleet.server.federation.coordinator import Coordinator
from fairfleet.server.federation.receipts import Receipt
from fairfleet.server.settings import ServerSettings
from fairfleet.server.storage.client_queries import client_software
from fairfleet.server.storage.store import Store
from fairfleet.server.transfer.published_model import PublishedModel
from fairfleet.server.transfer.upload import AnnouncedUpdate, Upload

REPORT = TrainReport(samples=10, loss_before=1.0, loss_after=0.5, steps=1, learning_rate=0.1)


class SlowStore(Store):
    """A store on a slow disk: its transactions wait while `free` is not set."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.free, self.waiting = threading.Event(), threading.Event()
        self.free.set()

    def record(self, *args: Any) -> None:
        """Record events when the disk is free."""
        self._wait()
        super().record(*args)

    def write(self, *args: Any) -> None:
        """Write rows when the disk is free."""
        self._wait()
        super().write(*args)

    def revoke(self, *args: Any) -> None:
        """Record a revocation, and return when the disk is free."""
        super().revoke(*args)
        self._wait()

    def _wait(self) -> None:
        if not self.free.is_set():
            self.waiting.set()
            self.free.wait(30)

    def block(self) -> None:
        """Let transactions wait from now on."""
        self.waiting.clear()
        self.free.clear()

    async def wait_until_blocked(self) -> None:
        """Return when a transaction waits."""
        assert await asyncio.to_thread(self.waiting.wait, 30)


class Server:
    """A running coordinator, its store and the sessions of its clients."""

    def __init__(self, coordinator: Coordinator, store: SlowStore) -> None:
        self.coordinator, self.store = coordinator, store
        self.sessions: dict[str, Session] = {}

    async def join(self, *clients: str) -> None:
        """Join these clients; what the server writes about them is written on return.

        Otherwise a test that blocks the store afterwards could block that write, and not its own.
        """
        for client in clients:
            self.sessions[client] = await self.coordinator.clients.join(
                ClientDescription(client, client, "", 10, 10, "raw32")
            )
        if self.store.free.is_set():
            await self.until(lambda: set(clients) <= client_software(self.store).keys())

    async def open(self, client: str, number: int, digest: bytes | None = None) -> Upload | Receipt:
        """Announce the update of a client and round, by default on the newest model."""
        coordinator = self.coordinator
        encoded, _ = update_of(client, number)
        announced = AnnouncedUpdate(
            client, number, "raw32", encoded.size_bytes, encoded.digest, REPORT
        )
        model = digest or coordinator.state.publication.digest
        return await coordinator.update_receiver.open(announced, model)

    async def send(self, client: str, number: int, digest: bytes | None = None) -> Receipt:
        """Announce and send the update of a client and round, and return its receipt."""
        opened = await self.open(client, number, digest)
        if isinstance(opened, Receipt):
            return opened
        return await self.coordinator.update_receiver.complete(
            opened, opened.token, update_of(client, number)[1]
        )

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until the condition holds, at most 30 seconds."""
        for _ in range(3000):
            if condition():
                return
            await asyncio.sleep(0.01)
        raise AssertionError(f"the condition never held: {self.coordinator.state.round}")

    async def round_without(self, late: str, *others: str) -> bytes:
        """Run a round that its deadline ends without `late`, and return the digest of its model."""
        number, digest = (
            self.coordinator.state.round.number,
            self.coordinator.state.publication.digest,
        )
        await self.until(lambda: self.coordinator.state.activity(late) == "train")
        for client in others:
            await self.send(client, number)
        await self.until(lambda: self.coordinator.state.publication.version == number + 1)
        return digest


def model() -> Model:
    """Return a model of ten zeros."""
    return Model.of({"w": np.zeros(10, np.float32)})


def update_of(client: str, number: int) -> tuple[EncodedStream, list[bytes]]:
    """Return the update of a client and round, and its messages."""
    row, messages = model(), list[bytes]()
    row.parameters[:] = number + ord(client[0])
    return encode(
        model_pieces(row), lambda head, data: messages.append(b"".join((head, data)))
    ), messages


@asynccontextmanager
async def serving(folder: Path, **settings: Any) -> AsyncIterator[Server]:
    """Start a coordinator in this folder; it must not fail before it is stopped."""
    store = SlowStore(folder)
    store.create("test", model(), PublishedModel.of(0, model()).digest)
    coordinator = Coordinator(store, ServerSettings.model_validate({"rounds": 1000, **settings}))
    await coordinator.start()
    try:
        yield Server(coordinator, store)
        assert not coordinator.failed.done(), coordinator.failed
    finally:
        store.free.set()
        await coordinator.stop()
        store.close()


async def start_waiting(work: Awaitable[Any]) -> asyncio.Task[Any]:
    """Start the work, check that it waits although everything else can run, and return its task."""
    task = asyncio.ensure_future(work)
    done, _ = await asyncio.wait([task], timeout=0.3)
    assert not done
    return task  # type: ignore[return-value]


def short_deadlines(**settings: Any) -> dict[str, Any]:
    """Return settings with deadlines of 0.3 s, and a quorum of two of three clients."""
    return {
        "round": {
            "minimum_clients": 3,
            "quorum": 0.6,
            "deadline_seconds": 0.3,
            "evaluate_every": 0,
            **settings,
        }
    }
