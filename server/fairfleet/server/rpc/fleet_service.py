"""The Fleet service, for clients.

Each method translates a request, calls one function of the federation, and translates its result.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

from fairfleet.common import wire
from fairfleet.common.errors import BadRequest, SessionUnknown, TryLater, WrongState, short
from fairfleet.common.features import SERVER_FEATURES
from fairfleet.proto.v1 import fleet_pb2 as pb
from fairfleet.server.federation.clients.assignments import Assignment
from fairfleet.server.federation.clients.sessions import Session
from fairfleet.server.federation.coordinator import Coordinator
from fairfleet.server.federation.receipts import Receipt
from fairfleet.server.rpc.fleet_messages import (
    MAX_FAILURE_CHARS,
    announcement_in,
    changed_counts,
    check_task,
    description_in,
    evaluation_in,
    quarantined_out,
    receipt_out,
    upload_token,
)
from fairfleet.server.rpc.handlers import Context
from fairfleet.server.rpc.model_downloads import ModelDownloads
from fairfleet.server.rpc.task_messages import TaskMessages
from fairfleet.server.rpc.update_uploads import UpdateUploads
from fairfleet.server.security.caller import caller
from fairfleet.server.transfer.codec_selection import Uplinks
from fairfleet.server.transfer.published_model import PublishedModel
from fairfleet.server.transfer.upload import Upload

KEPT_MODELS = {
    "received": pb.KEPT_MODELS_RECEIVED,
    "final": pb.KEPT_MODELS_FINAL,
    "none": pb.KEPT_MODELS_NONE,
}
RAW_STREAMS = frozenset({"TakeTask", "FetchModel", "SendUpload"})  # their streams are plain bytes


class FleetService:
    """What clients call."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator, self._clients = coordinator, coordinator.clients
        # The same message for every client: a large fleet may join at the same moment.
        self._signature = wire.signature_out(coordinator.signature)
        settings = coordinator.settings.privacy
        self._privacy = wire.privacy_out(settings.terms(coordinator.recipe)) if settings else None
        uplinks = Uplinks()
        self._tasks = TaskMessages(coordinator, uplinks, self._privacy)
        self._downloads = ModelDownloads(coordinator)
        self._uploads = UpdateUploads(coordinator, uplinks, is_private=self._privacy is not None)

    def admit(self, request: Any) -> None:
        """Count an unencrypted call, by the session that it names; raise LimitReached.

        `Authorization` counts the calls of peers with a certificate. Join names no session and
        has a limit of its own.
        """
        if caller.get() is None and not isinstance(request, pb.JoinRequest):
            with suppress(SessionUnknown):  # the call itself reports it
                self._count(self._clients.session(request.session).client)

    def _count(self, client: str) -> None:
        self._coordinator.request_limits.calls.take(client, asyncio.get_running_loop().time())

    # ---- sessions ------------------------------------------------------------------------------

    async def Join(self, request: pb.JoinRequest, context: Context) -> pb.JoinResponse:
        """Open a session for a client whose model, codecs and version fit this federation."""
        member = description_in(request)
        self._check_model(request)
        self._check_privacy(request)
        # Refuse a client without a common codec here, and not after it has trained.
        self._coordinator.codec_policy.choose(member.client, member.codecs)
        return self._joined(await self._clients.join(member))

    def _joined(self, session: Session) -> pb.JoinResponse:
        settings = self._coordinator.settings
        return pb.JoinResponse(
            session=session.id,
            fence=session.fence,
            lease_seconds=settings.lease_seconds,
            heartbeat_seconds=settings.lease_seconds / 4,
            federation=settings.name,
            signature=self._signature,
            privacy=self._privacy,
            brings_models=True,
            kept_models=KEPT_MODELS[settings.clients_keep],
            federation_id=self._coordinator.state.federation_id,
            protocol_version=session.member.protocol_version,
            features=SERVER_FEATURES,
        )

    def _check_model(self, request: pb.JoinRequest) -> None:
        count, expected = len(request.signature.tensors), len(self._signature.tensors)
        # Looking for the first difference creates an object per tensor: too many for a huge model.
        if count > 2 * expected + 1000:
            raise BadRequest(
                f"the model of {request.client} has {count} tensors; "
                f"this federation's has {expected}"
            )
        if not request.HasField("signature") or request.signature == self._signature:
            return
        signature = wire.signature_in(request.signature)
        if difference := self._coordinator.signature.difference(signature):
            raise BadRequest(
                f"the model of client {request.client} is not this federation's: {difference}. "
                "Give the client the task that the federation was initialised with."
            )

    def _check_privacy(self, request: pb.JoinRequest) -> None:
        if self._privacy is not None and not request.protects:
            raise WrongState(
                f"client {request.client} does not support the noise that this federation "
                "requires of its clients; install a newer fairfleet there"
            )

    async def Heartbeat(
        self, request: pb.HeartbeatRequest, context: Context
    ) -> pb.HeartbeatResponse:
        """Renew a lease, and say whether the client's task is still wanted."""
        check_task(self._clients.session(request.session).client, request)
        if request.failure:
            await self._clients.give_up(request.session, request.task, request.failure)
            return pb.HeartbeatResponse(abandon=True, reason="given up")
        progress = request.steps_done, request.steps_planned, request.loss
        if self._privacy and self._privacy.HasField("reports"):
            # The progress of a training that began before reports had to have noise.
            progress = (0, 0, 0.0)
        if self._clients.progress(request.session, request.task, *progress):
            return pb.HeartbeatResponse()
        reason = "the round continued without it" if request.task else "no task was named"
        return pb.HeartbeatResponse(abandon=True, reason=reason)

    async def Leave(self, request: pb.LeaveRequest, context: Context) -> pb.LeaveResponse:
        """End a session. A repeated call succeeds too."""
        with suppress(SessionUnknown):
            await self._clients.leave(
                request.session, short(request.reason), retires=request.retires
            )
        return pb.LeaveResponse()

    # ---- tasks and models ----------------------------------------------------------------------

    async def NextTask(self, request: pb.NextTaskRequest, context: Context) -> pb.NextTaskResponse:
        """Return the client's next task; hold the call for a while if there is none."""
        await self._note_counts(request)
        assignment = await self._clients.next_task(request.session)
        return self._next_task(request.session, assignment)

    async def TakeTask(self, request: pb.TakeTaskRequest, context: Context) -> AsyncIterator[bytes]:
        """Do as NextTask does, but send the model as soon as it exists, before its task."""
        await self._note_counts(request)
        model = await self._clients.next_model(request.session)
        is_new = model is not None and model.digest != request.held
        if model is not None and is_new and not self._downloads.has_shorter_form(model):
            with self._downloads.downloading(request.session, context) as call:
                for message in self._downloads.counted(model.messages_from(0), model.codec):
                    with call.sending():
                        yield message
        assignment = await self._clients.task_of_model(request.session)
        answer = self._next_task(request.session, assignment)
        context.set_trailing_metadata(((wire.TASK_METADATA, answer.SerializeToString()),))

    async def _note_counts(self, request: pb.NextTaskRequest | pb.TakeTaskRequest) -> None:
        train, test = changed_counts(request)
        if train is not None or test is not None:
            await self._clients.update_counts(request.session, train, test)

    def _next_task(self, session: str, assignment: Assignment | None) -> pb.NextTaskResponse:
        state = self._coordinator.state
        if state.stopping:
            raise TryLater("the server is stopping; try again")
        if assignment is not None:
            return self._task(session, assignment)
        if state.result is not None:
            return pb.NextTaskResponse(finished=self._finished(session, state.result))
        wait = pb.Wait(retry_after_seconds=self._clients.idle_retry_seconds(session))
        return pb.NextTaskResponse(wait=wait)

    def _finished(self, session: str, result: PublishedModel) -> pb.Finished:
        """Return the end of the federation, with its result unless clients may keep no model."""
        reason, state = self._coordinator.state.round.stopping, self._coordinator.state
        self._clients.acknowledge_finish(session)
        if state.settings.clients_keep == "none":
            return pb.Finished(reason=reason)
        member = self._clients.session(session).member
        return pb.Finished(reason=reason, model=self._tasks.model(member, result))

    def _task(self, session: str, assignment: Assignment) -> pb.NextTaskResponse:
        member = self._clients.session(session).member
        response = self._tasks.task(member, assignment)
        if notice := self._clients.quarantine_notice(member.client):
            response.quarantined.CopyFrom(quarantined_out(notice))
        return response

    async def FetchModel(
        self, request: pb.FetchModelRequest, context: Context
    ) -> AsyncIterator[bytes]:
        """Send a model or a change, from a chunk's offset on."""
        self._clients.session(request.session)
        publication = self._downloads.published(request)
        codec = self._coordinator.state.downlink.codec if request.change else publication.codec
        with self._downloads.downloading(request.session, context) as call:
            messages = publication.messages_from(request.offset_bytes)
            for message in self._downloads.counted(messages, codec):
                with call.sending():
                    yield message

    # ---- updates and reports -------------------------------------------------------------------

    async def OpenUpload(
        self, request: pb.OpenUploadRequest, context: Context
    ) -> pb.OpenUploadResponse:
        """Return where an update is to be sent and from which offset on, or its receipt."""
        opened = await self._uploads.open(request)
        if isinstance(opened, Receipt):
            return pb.OpenUploadResponse(receipt=receipt_out(opened))
        return pb.OpenUploadResponse(upload=opened.token, offset_bytes=opened.offset_bytes)

    async def SendUpload(
        self, stream: AsyncIterator[bytes], context: Context
    ) -> pb.SendUploadResponse:
        """Receive an update that was opened before, or that the call's metadata announce."""
        metadata: dict[str, Any] = dict(context.invocation_metadata() or ())
        if wire.ANNOUNCED_METADATA in metadata:
            opened = await self._open_announced(metadata[wire.ANNOUNCED_METADATA])
            if isinstance(opened, Receipt):
                return pb.SendUploadResponse(receipt=receipt_out(opened))
            upload, token = opened, opened.token
        else:
            token = upload_token(metadata)
            upload = self._uploads.opened(token)
            if caller.get() is None:
                self._count(upload.announced.client)
        receipt = await self._uploads.receive(upload, token, stream)
        return pb.SendUploadResponse(receipt=receipt_out(receipt))

    async def _open_announced(self, data: bytes) -> Upload | Receipt:
        announcement = announcement_in(data)
        self.admit(announcement)
        opened = await self._uploads.open(announcement)
        if isinstance(opened, Upload) and opened.offset_bytes:
            raise WrongState(
                "a part of this update was received before; open it to learn where to continue"
            )
        return opened

    async def ReportEvaluation(
        self, request: pb.ReportEvaluationRequest, context: Context
    ) -> pb.ReportEvaluationResponse:
        """Accept a client's evaluation of a version, or why there is none."""
        features = self._clients.session(request.session).member.features
        await self._clients.report_evaluation(
            request.session,
            request.version,
            evaluation_in(request, features),
            short(request.failure, MAX_FAILURE_CHARS),
            wire.privacy_in(request.privacy),
        )
        return pb.ReportEvaluationResponse()

    async def ReportVerification(
        self, request: pb.ReportVerificationRequest, context: Context
    ) -> pb.ReportVerificationResponse:
        """Accept the losses that a client measured for a proposed step."""
        failure = short(request.failure, MAX_FAILURE_CHARS)
        await self._clients.report_verification(
            request.session, request.round, request.step_digest, request.losses, failure
        )
        return pb.ReportVerificationResponse()
