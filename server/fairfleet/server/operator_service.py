"""The Operator service: what people and tools ask of a federation, and may tell it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import BinaryIO

from fairfleet.common import wire
from fairfleet.common.codecs import CHUNK_BYTES
from fairfleet.common.errors import BadRequest, NotKept
from fairfleet.common.tensors import Section
from fairfleet.proto.v1 import operator_pb2 as pb
from fairfleet.server.coordinator import Coordinator
from fairfleet.server.handlers import Context
from fairfleet.server.round_records import record_out
from fairfleet.server.store import Store

PAGE = 100  # records read from the database at a time
DOING = {
    "train": pb.CLIENT_STATE_TRAINING,
    "verify": pb.CLIENT_STATE_VERIFYING,
    "evaluate": pb.CLIENT_STATE_EVALUATING,
}


class OperatorService:
    def __init__(self, coordinator: Coordinator, store: Store) -> None:
        self._coordinator = coordinator
        self._store = store

    async def Status(self, request: pb.StatusRequest, context: Context) -> pb.StatusResponse:  # noqa: N802
        coordinator, round = self._coordinator, self._coordinator.round
        return pb.StatusResponse(
            federation=coordinator.settings.name,
            version=coordinator.publication.version,
            rounds_planned=coordinator.settings.rounds,
            phase=pb.Phase.Value(f"PHASE_{round.phase.name}"),
            attempt=round.attempt,
            paused=round.paused,
            connected=len(coordinator.sessions),
            asked=len(round.asked),
            received=len(round.received),
            missing=coordinator.missing_clients(),
            rule=coordinator.recipe.name,
            parameters=coordinator.signature.size(Section.PARAMETERS),
            bytes_received=coordinator.traffic.received_bytes,
            bytes_sent=coordinator.traffic.sent_bytes,
            uptime_seconds=coordinator.uptime_seconds,
        )

    async def Watch(self, request: pb.WatchRequest, context: Context) -> AsyncIterator[pb.Event]:  # noqa: N802
        events = self._coordinator.broadcast.watch()
        await context.send_initial_metadata(())  # from here on nothing is missed: the contract
        async for event in events:
            yield event

    async def Rounds(self, request: pb.RoundsRequest, context: Context) -> AsyncIterator[pb.RoundRecord]:  # noqa: N802
        newest = self._coordinator.publication.version - 1
        last = min(request.last or newest, newest)
        for first in range(request.first, last + 1, PAGE):
            for record in await asyncio.to_thread(self._store.records, first, min(first + PAGE - 1, last)):
                yield record_out(record)

    async def Clients(  # noqa: N802
        self, request: pb.ClientsRequest, context: Context
    ) -> AsyncIterator[pb.ClientRecord]:
        committed = self._coordinator.publication.version
        counts = await asyncio.to_thread(self._store.update_counts, committed)
        evaluations = await asyncio.to_thread(self._store.newest_evaluations)
        revoked = await asyncio.to_thread(self._store.revoked)
        connected = {session.client: session for session in self._coordinator.sessions.all()}
        now = asyncio.get_running_loop().time()
        for client in sorted(counts.keys() | evaluations.keys() | revoked.keys() | connected.keys()):
            record = pb.ClientRecord(client=client, state=self._state(client, client in revoked))
            if session := connected.get(client):
                record.device = session.member.device
                record.train_samples = session.member.train_samples
                record.test_samples = session.member.test_samples
                record.seconds_since_seen = 0.0 if session.polls else max(0.0, now - session.last_seen)
            if client in counts:
                record.updates_counted, record.last_counted_round = counts[client]
            if client in evaluations:
                record.evaluated_version, evaluation = evaluations[client]
                record.evaluation.MergeFrom(wire.evaluation_out(evaluation))
            yield record

    def _state(self, client: str, revoked: bool) -> pb.ClientState.ValueType:
        if revoked:
            return pb.CLIENT_STATE_REVOKED
        if self._coordinator.sessions.get(client) is None:
            return pb.CLIENT_STATE_GONE
        doing = self._coordinator.doing(client)
        return DOING.get(doing, pb.CLIENT_STATE_IDLE)

    async def Pause(self, request: pb.PauseRequest, context: Context) -> pb.PauseResponse:  # noqa: N802
        await self._coordinator.pause()
        return pb.PauseResponse()

    async def Resume(self, request: pb.ResumeRequest, context: Context) -> pb.ResumeResponse:  # noqa: N802
        await self._coordinator.resume()
        return pb.ResumeResponse()

    async def Stop(self, request: pb.StopRequest, context: Context) -> pb.StopResponse:  # noqa: N802
        await self._coordinator.end(request.reason or "stopped by an operator")
        return pb.StopResponse()

    async def Revoke(self, request: pb.RevokeRequest, context: Context) -> pb.RevokeResponse:  # noqa: N802
        if not request.client:
            raise BadRequest("name the client to revoke")
        await self._coordinator.revoke(request.client, request.reason)
        return pb.RevokeResponse()

    async def ExportModel(  # noqa: N802
        self, request: pb.ExportModelRequest, context: Context
    ) -> AsyncIterator[pb.FileChunk]:
        newest = self._coordinator.publication.version
        version = request.version if request.HasField("version") else newest
        found = await asyncio.to_thread(self._store.model, version)
        if found is None:
            raise NotKept(f"version {version} is not kept; the newest is {newest}")
        with self._store.reading(found) as path:
            try:
                file = await asyncio.to_thread(open, path, "rb")
            except FileNotFoundError:
                raise NotKept(f"version {version} was just retired; the newest is {newest}") from None
            async for chunk in _file_chunks(file, version):
                yield chunk


async def _file_chunks(file: BinaryIO, version: int) -> AsyncIterator[pb.FileChunk]:
    with file:
        size = file.seek(0, 2)
        file.seek(0)
        for offset in range(0, size, CHUNK_BYTES):
            data = await asyncio.to_thread(file.read, CHUNK_BYTES)
            yield pb.FileChunk(offset_bytes=offset, data=data, size_bytes=size, version=version)
