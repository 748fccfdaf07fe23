"""The test bench: one server on a fixed address, which a check can restart with other settings.

It is the server that `fairfleet server` runs, without its HTTP endpoint. Its state is in a
temporary folder.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import grpc.aio
import numpy as np

from fairfleet.common.chunk_stream import Decoder
from fairfleet.common.codecs import codec_named
from fairfleet.common.tensors import Model
from fairfleet.proto.v1 import fleet_pb2 as pb
from fairfleet.server.app import grpc_server, open_store
from fairfleet.server.conformance.faults import Faults
from fairfleet.server.conformance.faulty_service import FaultyFleetService
from fairfleet.server.conformance.observed_calls import CallLog, CheckFailed, ObservedCall
from fairfleet.server.federation.coordinator import Coordinator
from fairfleet.server.rpc.endpoints import Endpoints, check_transport
from fairfleet.server.settings import ServerSettings
from fairfleet.server.storage.store import Store

STOP_SECONDS = 1.0  # for calls that are being answered


def several_chunks_model() -> Model:
    """Return the initial model: several chunks of parameters, and tensors in all sections."""
    weight = (np.arange(600 * 1000) % 251 - 125).astype(np.float32) / 1000
    return Model.of(
        {"weight": weight.reshape(600, 1000)},
        {"mean": np.zeros(4, np.float32), "steps": np.array(0, np.int64)},
    )


@dataclass
class RunningServer:
    """The parts of one run of the server."""

    store: Store
    coordinator: Coordinator
    endpoints: Endpoints
    server: grpc.aio.Server

    async def stop(self, grace_seconds: float | None) -> None:
        """Stop as a server does; with None, break off every call at once."""
        self.coordinator.begin_shutdown()
        await self.endpoints.stop()
        await self.server.stop(grace_seconds)
        await self.coordinator.stop()
        self.store.close()


@dataclass
class Bench:
    """The server under which a client is checked, and what it saw."""

    settings: dict[str, Any]  # of every run: where to listen, where the state is
    log: CallLog
    faults: Faults = field(default_factory=Faults)
    address: str = ""
    _running: RunningServer | None = None
    _level: dict[str, Any] = field(default_factory=dict)
    _joined: pb.JoinResponse = field(default_factory=pb.JoinResponse)

    async def start(self, level: dict[str, Any], joined: pb.JoinResponse) -> None:
        """Start the server with the settings of a level; `joined` changes the answers to Join."""
        self._level, self._joined = level, joined
        settings = ServerSettings(**{**self.settings, **level})
        check_transport(settings)
        store = open_store(settings)
        coordinator = Coordinator(store, settings)
        endpoints = Endpoints(coordinator, store, settings)
        service = FaultyFleetService(coordinator, self.log, self.faults, joined)
        server = grpc_server(coordinator, store, endpoints, service)
        self.address = endpoints.bind(server, self.address or settings.listen)
        await coordinator.start()
        await server.start()
        self._running = RunningServer(store, coordinator, endpoints, server)

    async def stop(self) -> None:
        """Stop the server, if it runs."""
        running, self._running = self._running, None
        if running is not None:
            await running.stop(STOP_SECONDS)

    async def restart(self) -> None:
        """Break off every call, and start again on the same address and state."""
        running, self._running = self._running, None
        assert running is not None, "only a running server is restarted"
        await running.stop(None)
        await self.start(self._level, self._joined)
        self.log.add("Restarted", None)

    @property
    def coordinator(self) -> Coordinator:
        """The running federation."""
        assert self._running is not None, "the server runs while checks do"
        return self._running.coordinator

    @property
    def next_round(self) -> int:
        """The number of a round that no client knows yet."""
        return self.coordinator.state.round.number + 1

    @property
    def joined(self) -> pb.JoinRequest:
        """How the client joined last."""
        request: pb.JoinRequest = self.log.newest("Join").request
        return request

    async def take_over(self) -> None:
        """Join as another process of the client, so that its session is superseded."""
        session = self.coordinator.runner.sessions.get(self.joined.client)
        if session is None:
            raise CheckFailed("expected a connected client; it has no session")
        await self.coordinator.clients.join(
            replace(session.member, instance="another process", since=0)
        )

    async def update_of(
        self, round_number: int | None = None, position: int = 0
    ) -> tuple[ObservedCall, Model]:
        """Wait for the receipt of an update; return it with the decoded update.

        The update is that of a round, or of any round from a position in the log on.
        """
        receipt = await self.log.next(
            "Receipt",
            position,
            "an update that counts",
            lambda call: (
                round_number in (None, call.request.round)
                and call.response.outcome == pb.OUTCOME_COUNTED
            ),
        )
        decoder = Decoder(
            Model.empty(self.coordinator.signature), codec_named(receipt.request.codec)
        )
        for message in self.log.chunks_of(receipt.request.digest):
            decoder.take(message)
        decoder.finish(receipt.request.digest)
        return receipt, decoder.into

    async def restart_when_due(self) -> None:
        """Restart the server whenever a fault asks for it; runs until it is cancelled."""
        while True:
            await self.faults.restart.wait()
            self.faults.restart.clear()
            await self.restart()


def base_settings(folder: Path, **more: Any) -> dict[str, Any]:
    """Return the settings that all levels have in common."""
    model = folder / "model.safetensors"
    if not model.exists():
        several_chunks_model().save(model)
    return {
        "name": "conformance",
        "state_dir": folder / "state",
        "model": model,
        "rounds": 1_000_000,
        "round": {"minimum_clients": 1, "evaluate_every": 0, "deadline_seconds": 3600.0},
        # With a decay, a client that keeps the rate of its first task reports a wrong one.
        "plan": {
            "epochs": 1,
            "batch_size": 8,
            "learning_rate": 0.05,
            "learning_rate_decay": 0.99,
        },
        "codec": "raw32",
        "keep_models": 2,
        "lease_seconds": 8.0,
        "limits": {"joins_at_once": 1000, "polls_per_minute": 6000},
        **more,
    }
