"""The Operator service: what people and tools ask of a federation, and may tell it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import BinaryIO

from fairfleet.common import wire
from fairfleet.common.codecs import CHUNK_BYTES
from fairfleet.common.errors import BadRequest, NotKept, short
from fairfleet.common.identity import is_name
from fairfleet.common.tensors import Section
from fairfleet.proto.v1 import operator_pb2 as pb
from fairfleet.server.client_records import update_counts
from fairfleet.server.coordinator import Coordinator
from fairfleet.server.enrolling import Enrolling
from fairfleet.server.evaluation_records import newest_evaluations
from fairfleet.server.handlers import Context
from fairfleet.server.operators import Operators
from fairfleet.server.round_records import record_out
from fairfleet.server.store import Store

MOST_WORDS = 300  # characters of a reason that is kept
PAGE = 100  # records read from the database at a time
DOING = {
    "train": pb.CLIENT_STATE_TRAINING,
    "verify": pb.CLIENT_STATE_VERIFYING,
    "evaluate": pb.CLIENT_STATE_EVALUATING,
}


class OperatorService:
    def __init__(self, coordinator: Coordinator, store: Store, operators: Operators, enrolling: Enrolling) -> None:
        self._coordinator = coordinator
        self._store = store
        self._operators, self._enrolling = operators, enrolling

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
            privacy=coordinator.spending.status() if coordinator.spending else None,
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
        counts = await asyncio.to_thread(update_counts, self._store, committed)
        evaluations = await asyncio.to_thread(newest_evaluations, self._store)
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
        await self._coordinator.end(short(request.reason, MOST_WORDS) or "stopped by an operator")
        return pb.StopResponse()

    async def Revoke(self, request: pb.RevokeRequest, context: Context) -> pb.RevokeResponse:  # noqa: N802
        if not is_name(request.client):
            raise BadRequest(
                f"name the client to revoke; {short(request.client)!r} is not 1 to 64 of a-z A-Z 0-9 . _ -"
            )
        reason = short(request.reason, MOST_WORDS)
        if request.operator:
            await self._operators.revoke(request.client, reason)
        else:
            await self._coordinator.revoke(request.client, reason)
        return pb.RevokeResponse()

    async def MakeToken(self, request: pb.MakeTokenRequest, context: Context) -> pb.MakeTokenResponse:  # noqa: N802
        told = request.client, request.seconds, request.certificate_seconds
        secret, ca = await self._enrolling.make_token(*told)
        return pb.MakeTokenResponse(secret=secret, ca=ca, port=self._enrolling.port or 0)

    async def ExportModel(  # noqa: N802
        self, request: pb.ExportModelRequest, context: Context
    ) -> AsyncIterator[pb.FileChunk]:
        newest = self._coordinator.publication.version
        version = request.version if request.HasField("version") else newest
        found = await asyncio.to_thread(self._store.model, version) if version <= newest else None
        if found is None:
            raise NotKept(f"version {version} is not kept; the newest is {newest}")
        with self._store.files.reading(found.file) as path:
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
