"""The server's own Fleet service, which records every call and lets armed faults happen.

It answers as the service that it inherits; only faults and changed tasks are added here.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc

from fairfleet.common import wire
from fairfleet.common.errors import (
    Corrupted,
    FleetError,
    LimitReached,
    SessionUnknown,
    Superseded,
    TryLater,
    WrongState,
)
from fairfleet.common.tensors import Section
from fairfleet.proto.v1 import fleet_pb2 as pb
from fairfleet.server.conformance.faults import Fault, Faults, StreamCut, damaged
from fairfleet.server.conformance.observed_calls import CallLog, ObservedCall
from fairfleet.server.federation.clients.assignments import Assignment
from fairfleet.server.federation.coordinator import Coordinator
from fairfleet.server.rpc.fleet_service import FleetService
from fairfleet.server.rpc.handlers import Context

PAUSE_SECONDS = 2.0  # that a client is asked for
RAW_CHUNK_ELEMENTS = 1 << 18
# Answers that a client must expect, so they do not fail a check.
EXPECTED: tuple[type[FleetError], ...] = (SessionUnknown, TryLater, LimitReached)


class FaultyFleetService(FleetService):
    """Answers a client that is being checked."""

    def __init__(
        self, coordinator: Coordinator, log: CallLog, faults: Faults, joined: pb.JoinResponse
    ) -> None:
        """`joined` has fields that replace those of every answer to Join."""
        super().__init__(coordinator)
        self._log, self._faults, self._joined_fields = log, faults, joined
        self._announced = dict[bytes, pb.OpenUploadRequest]()  # by token
        self._turned_down = list[ObservedCall]()
        self._is_long = coordinator.signature.size(Section.PARAMETERS) > RAW_CHUNK_ELEMENTS

    @contextlib.contextmanager
    def _watching(self, name: str, *expected: type[FleetError]) -> Iterator[None]:
        """Record an error that the client caused, unless it is of an expected kind."""
        try:
            yield
        except Superseded:
            self._log.add("Aborted", name)
            raise
        except FleetError as error:
            if not isinstance(error, EXPECTED + expected):
                self._log.add("Refused", name, str(error))
            raise

    def admit(self, request: Any) -> None:
        """Do as the server does, which may refuse a superseded process here."""
        with self._watching(type(request).__name__):
            super().admit(request)

    async def Join(self, request: pb.JoinRequest, context: Context) -> pb.JoinResponse:
        self._log.add("JoinAttempt", request)
        with self._watching("Join"):
            response = await super().Join(request, context)
        if self._joined_fields.HasField("privacy"):
            response.privacy.CopyFrom(self._joined_fields.privacy)
        response.brings_models = self._joined_fields.brings_models
        self._log.add("Join", request, response)
        return response

    async def Leave(self, request: pb.LeaveRequest, context: Context) -> pb.LeaveResponse:
        self._log.add("Leave", request)
        return await super().Leave(request, context)

    async def Heartbeat(
        self, request: pb.HeartbeatRequest, context: Context
    ) -> pb.HeartbeatResponse:
        with self._watching("Heartbeat"):
            response = await super().Heartbeat(request, context)
        if request.task and request.task == self._faults.abandoned:
            response = pb.HeartbeatResponse(abandon=True, reason="this task is a test")
        self._log.add("Heartbeat", request, response)
        return response

    # ---- tasks and models ----------------------------------------------------------------------

    def _begin_poll(self, request: pb.NextTaskRequest | pb.TakeTaskRequest) -> None:
        """Record a poll, and let its fault happen."""
        self._log.add("NextTask", request)
        if any(call.request.round == self._faults.refused_round for call in self._turned_down):
            self._faults.refused_round = -1
        fault = self._faults.take("NextTask")
        if fault is Fault.PAUSE:
            raise LimitReached("this pause is a test", retry_seconds=PAUSE_SECONDS)
        if fault is Fault.FORGET:
            sessions = self._coordinator.runner.sessions
            sessions.remove(sessions.find(request.session))

    async def NextTask(self, request: pb.NextTaskRequest, context: Context) -> pb.NextTaskResponse:
        with self._watching("NextTask"):
            self._begin_poll(request)
            return await super().NextTask(request, context)

    async def TakeTask(self, request: pb.TakeTaskRequest, context: Context) -> AsyncIterator[bytes]:
        with self._watching("TakeTask"):
            self._begin_poll(request)
            async for message in super().TakeTask(request, context):
                yield message

    def _next_task(self, session: str, assignment: Assignment | None) -> pb.NextTaskResponse:
        response = self._faults.changed(super()._next_task(session, assignment))
        self._log.add("Task", None, response)
        return response

    async def FetchModel(
        self, request: pb.FetchModelRequest, context: Context
    ) -> AsyncIterator[bytes]:
        self._log.add("FetchModel", request)
        fault, sent = self._faults.take("FetchModel"), 0
        messages = super().FetchModel(request, context)
        async with contextlib.aclosing(messages):  # type: ignore[type-var]  # it is a generator
            async for message in messages:
                if fault is Fault.CUT and sent == int(self._is_long):
                    break_off(context)
                    return
                yield damaged(message) if fault is Fault.DAMAGE and not sent else message
                sent += 1
        self._log.add("Fetched", request)

    # ---- updates and reports -------------------------------------------------------------------

    async def OpenUpload(
        self, request: pb.OpenUploadRequest, context: Context
    ) -> pb.OpenUploadResponse:
        self._turn_down(request)
        with self._watching("OpenUpload"):
            response = await super().OpenUpload(request, context)
        self._announced[response.upload] = request
        self._log.add("OpenUpload", request, response)
        return response

    def _turn_down(self, request: pb.OpenUploadRequest) -> None:
        """Refuse an announced update, if that is due."""
        if request.round == self._faults.refused_round:
            self._turned_down.append(self._log.add("TurnedDown", request))
            raise WrongState("this refusal is a test; request a new task")

    async def SendUpload(
        self, stream: AsyncIterator[bytes], context: Context
    ) -> pb.SendUploadResponse:
        request = self._announcement(dict(context.invocation_metadata() or ()))
        self._turn_down(request)
        self._log.add("SendUpload", request)
        fault = self._faults.take("SendUpload")
        collected = self._collected(stream, request.digest)
        expected = (Corrupted,) if fault is Fault.DAMAGE else ()
        try:
            with self._watching("SendUpload", *expected):
                response = await super().SendUpload(self._faults.upload(collected, fault), context)
        except StreamCut:
            break_off(context)
            return pb.SendUploadResponse()
        self._log.add("Receipt", request, response.receipt)
        return response

    def _announcement(self, metadata: dict[str, Any]) -> pb.OpenUploadRequest:
        if wire.ANNOUNCED_METADATA in metadata:
            return pb.OpenUploadRequest.FromString(metadata[wire.ANNOUNCED_METADATA])
        token = metadata.get(wire.UPLOAD_METADATA, b"")
        return self._announced.get(token, pb.OpenUploadRequest())

    async def _collected(self, stream: AsyncIterator[bytes], digest: bytes) -> AsyncIterator[bytes]:
        """Keep the chunks of the newest update for the checks."""
        async for message in stream:
            self._log.keep_chunk(digest, message)
            yield message

    async def ReportEvaluation(
        self, request: pb.ReportEvaluationRequest, context: Context
    ) -> pb.ReportEvaluationResponse:
        with self._watching("ReportEvaluation"):
            response = await super().ReportEvaluation(request, context)
        self._log.add("ReportEvaluation", request, response)
        return response

    async def ReportVerification(
        self, request: pb.ReportVerificationRequest, context: Context
    ) -> pb.ReportVerificationResponse:
        with self._watching("ReportVerification"):
            response = await super().ReportVerification(request, context)
        self._log.add("ReportVerification", request, response)
        return response


def break_off(context: Context) -> None:
    """End a call as a lost connection does: without the mark of the server's own errors."""
    context.set_code(grpc.StatusCode.UNAVAILABLE)
    context.set_details("this broken connection is a test")
