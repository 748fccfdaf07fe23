"""The Fleet service: each method translates, calls one plain function of the coordinator, translates back."""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

from google.protobuf.message import DecodeError

from fairfleet.common import wire
from fairfleet.common.codecs import needs
from fairfleet.common.errors import (
    BadRequest,
    Corrupted,
    LimitReached,
    NotKept,
    Refused,
    SessionUnknown,
    TryLater,
    WrongState,
    short,
)
from fairfleet.proto.v1 import fleet_pb2 as pb
from fairfleet.server.codec_policy import Uplinks
from fairfleet.server.coordinator import Coordinator
from fairfleet.server.handlers import Context
from fairfleet.server.intake import raw_bytes
from fairfleet.server.publication import Publication
from fairfleet.server.reception import Receipt
from fairfleet.server.roster import Assignment
from fairfleet.server.rounds import Phase
from fairfleet.server.sessions import Member
from fairfleet.server.uploads import Announced, Upload

NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
UPLOAD_BATCH = 2  # chunks that are decoded together: every hop to a thread costs
RAW_STREAMS = frozenset({"FetchModel", "SendUpload"})


class FleetService:
    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator
        self._codecs = coordinator.settings.codec_policy(raw_bytes(coordinator.signature))
        self._uplinks = Uplinks()
        self._signature = wire.signature_out(coordinator.signature)  # made once: a whole fleet may join at a time

    async def Join(self, request: pb.JoinRequest, context: Context) -> pb.JoinResponse:  # noqa: N802
        if request.protocol_version != wire.PROTOCOL_VERSION:
            raise WrongState(
                f"client {short(request.client)} speaks protocol version {request.protocol_version}; "
                f"this server speaks {wire.PROTOCOL_VERSION}. Upgrade the older side."
            )
        if not NAME.fullmatch(request.client) or request.client in (".", ".."):
            raise BadRequest(f"client name {short(request.client)!r} is not 1 to 64 of a-z A-Z 0-9 . _ -")
        self._check_model(request)
        settings = self._coordinator.settings
        member = Member(
            request.client,
            request.instance,
            short(request.device),
            request.train_samples,
            request.test_samples,
            tuple(request.codecs),
            request.verifies,
            request.since,
        )
        self._codecs.choose(member.client, member.codecs)  # or it is refused here, not when it has trained
        session = await self._coordinator.join(member)
        return pb.JoinResponse(
            session=session.id,
            fence=session.fence,
            lease_seconds=settings.lease_seconds,
            heartbeat_seconds=settings.lease_seconds / 4,
            federation=settings.name,
            signature=self._signature,
        )

    def _check_model(self, request: pb.JoinRequest) -> None:
        if request.HasField("signature") and request.signature != self._signature:
            difference = self._coordinator.signature.difference(wire.signature_in(request.signature))
            if difference:
                raise BadRequest(
                    f"the model of client {request.client} is not this federation's: {difference}. "
                    "Give the client the task that the federation was initialised with."
                )

    async def NextTask(self, request: pb.NextTaskRequest, context: Context) -> pb.NextTaskResponse:  # noqa: N802
        coordinator = self._coordinator
        assignment = await coordinator.next_task(request.session)
        if coordinator.stopping:
            raise TryLater("the server is stopping; try again")
        if assignment is not None:
            return self._task(request.session, assignment)
        if coordinator.round.phase is Phase.FINISHED:
            coordinator.told_finished(request.session)
            return pb.NextTaskResponse(finished=pb.Finished(reason=coordinator.round.stopping))
        return pb.NextTaskResponse(wait=pb.Wait(retry_after_seconds=coordinator.send_away(request.session)))

    def _task(self, session: str, assignment: Assignment) -> pb.NextTaskResponse:
        coordinator, publication = self._coordinator, self._coordinator.publication
        member = coordinator.session(session).member
        model = pb.ModelRef(
            version=publication.version,
            digest=publication.digest,
            size_bytes=publication.size_bytes,
            changes=self._changes(member),
        )
        left = max(0.0, assignment.ends - asyncio.get_running_loop().time())
        if assignment.kind == "evaluate":
            return pb.NextTaskResponse(evaluate=pb.EvaluateTask(id=assignment.id, model=model, seconds_left=left))
        if assignment.kind == "verify":
            return self._verify_task(assignment, model, left)
        plan = coordinator.plan.for_client(member.client, assignment.version)
        return pb.NextTaskResponse(
            train=pb.TrainTask(
                id=assignment.id,
                round=assignment.version,
                model=model,
                plan=wire.plan_out(plan),
                codec=self._codecs.choose(member.client, member.codecs, self._uplinks.of(member.client)),
                seconds_left=left,
                report_gradient_norm="gradient_norm" in coordinator.recipe.rule.needs().reports,
                error_feedback=coordinator.settings.compression.error_feedback,
            )
        )

    def _verify_task(self, assignment: Assignment, model: pb.ModelRef, left: float) -> pb.NextTaskResponse:
        proposal = self._coordinator.proposal
        if proposal is None:
            raise TryLater("the step was just taken; ask again")
        step, halvings = self._change(proposal.publication), proposal.trials.halvings
        task = pb.VerifyTask(id=assignment.id, model=model, step=step, halvings=halvings, seconds_left=left)
        return pb.NextTaskResponse(verify=task)

    def _changes(self, member: Member) -> list[pb.Change]:
        downlink = self._coordinator.downlink
        if not needs(downlink.codec) <= set(member.codecs):
            return []
        return [self._change(change) for change in downlink.changes]

    def _change(self, change: Publication) -> pb.Change:
        return pb.Change(
            version=change.version,
            digest=change.digest,
            size_bytes=change.size_bytes,
            codec=self._coordinator.downlink.codec,
            halvings=change.halvings,
        )

    async def FetchModel(self, request: pb.FetchModelRequest, context: Context) -> AsyncIterator[bytes]:  # noqa: N802
        client = self._coordinator.session(request.session).client
        newest = self._coordinator.publication
        kept = self._kept_changes() if request.change else (newest,)
        publication = next((found for found in kept if found.version == request.version), None)
        if publication is None:
            raise NotKept(
                f"{'the change to ' * request.change}version {request.version} is not published; the newest is "
                f"{newest.version}. Ask for the next task."
            )
        codec = self._coordinator.downlink.codec if request.change else "raw32"
        with self._coordinator.transferring(client):
            for message in publication.messages_from(request.offset_bytes):
                yield message
                self._coordinator.traffic.gave(codec, len(message))

    def _kept_changes(self) -> tuple[Publication, ...]:
        """Those that lead to committed versions, and the step that is being tried."""
        proposal = self._coordinator.proposal
        return (*self._coordinator.downlink.changes, *((proposal.publication,) if proposal else ()))

    async def OpenUpload(self, request: pb.OpenUploadRequest, context: Context) -> pb.OpenUploadResponse:  # noqa: N802
        opened = await self._open(request)
        if isinstance(opened, Receipt):
            return pb.OpenUploadResponse(receipt=receipt_out(opened))
        return pb.OpenUploadResponse(upload=opened.token, offset_bytes=opened.offset_bytes)

    async def _open(self, request: pb.OpenUploadRequest) -> Upload | Receipt:
        coordinator = self._coordinator
        client = coordinator.session(request.session).client
        with self._counting_refusals():
            report = wire.report_in(request.report)
            announced = Announced(client, request.round, request.codec, request.size_bytes, request.digest, report)
            opened = await coordinator.uploads.open(announced, request.model_digest)
        if isinstance(opened, Receipt):
            coordinator.traffic.outcomes["repeated" if opened.counted else "late"] += 1
        else:
            coordinator.traffic.resumed += opened.offset_bytes > 0
        return opened

    async def SendUpload(self, stream: AsyncIterator[bytes], context: Context) -> pb.SendUploadResponse:  # noqa: N802
        coordinator, uploads = self._coordinator, self._coordinator.uploads
        metadata: dict[str, Any] = dict(context.invocation_metadata() or ())
        if wire.ANNOUNCED_METADATA in metadata:
            opened = await self._open(announced_in(metadata[wire.ANNOUNCED_METADATA]))
            if isinstance(opened, Receipt):
                return pb.SendUploadResponse(receipt=receipt_out(opened))
            if opened.offset_bytes:
                raise WrongState("a part of this update is here already; open it to learn where to go on")
            upload, token = opened, opened.token
        else:
            token = metadata.get(wire.UPLOAD_METADATA, b"")
            upload = uploads.under_way(token)
        try:
            with coordinator.transferring(upload.announced.client), self._counting_refusals():
                with self._measuring(upload):
                    rest = await _receive(stream, lambda messages: uploads.take_chunks(upload, token, messages))
                receipt = await uploads.complete(upload, token, rest)
                coordinator.traffic.outcomes["late"] += not receipt.counted
                return pb.SendUploadResponse(receipt=receipt_out(receipt))
        except Refused as error:
            if isinstance(error, BadRequest):
                uploads.discard(upload)
            where = f"update of {upload.announced.client} for round {upload.announced.round}"
            raise type(error)(f"{where}: {error}") from None
        except OSError as error:
            uploads.discard(upload)  # what is on the disk may not be what was received
            raise TryLater(f"the server cannot write to its disk: {error.strerror}") from error

    @contextlib.contextmanager
    def _counting_refusals(self) -> Iterator[None]:
        try:
            yield
        except (BadRequest, Corrupted, LimitReached):
            self._coordinator.traffic.outcomes["refused"] += 1
            raise

    @contextlib.contextmanager
    def _measuring(self, upload: Upload) -> Iterator[None]:
        """How fast the client's uplink is, for those whose codec depends on it."""
        began, left = time.monotonic(), upload.announced.size_bytes - upload.offset_bytes
        yield
        self._uplinks.saw(upload.announced.client, left, time.monotonic() - began)

    async def ReportEvaluation(  # noqa: N802
        self, request: pb.ReportEvaluationRequest, context: Context
    ) -> pb.ReportEvaluationResponse:
        evaluation = None if request.failure else wire.evaluation_in(request.evaluation)
        failure = short(request.failure, 300)
        await self._coordinator.report_evaluation(request.session, request.version, evaluation, failure)
        return pb.ReportEvaluationResponse()

    async def ReportVerification(  # noqa: N802
        self, request: pb.ReportVerificationRequest, context: Context
    ) -> pb.ReportVerificationResponse:
        failure = short(request.failure, 300)
        await self._coordinator.report_verification(
            request.session, request.round, request.step_digest, request.losses, failure
        )
        return pb.ReportVerificationResponse()

    async def Heartbeat(self, request: pb.HeartbeatRequest, context: Context) -> pb.HeartbeatResponse:  # noqa: N802
        coordinator = self._coordinator
        if request.failure:
            await coordinator.give_up(request.session, request.task, request.failure)
            return pb.HeartbeatResponse(abandon=True, reason="given up")
        wanted = coordinator.progress(
            request.session, request.task, request.steps_done, request.steps_planned, request.loss
        )
        return pb.HeartbeatResponse(abandon=not wanted, reason="" if wanted else "the round went on without it")

    async def Leave(self, request: pb.LeaveRequest, context: Context) -> pb.LeaveResponse:  # noqa: N802
        with contextlib.suppress(SessionUnknown):  # a repetition: it has left already
            await self._coordinator.leave(request.session, short(request.reason))
        return pb.LeaveResponse()


async def _receive(stream: AsyncIterator[bytes], take: Callable[[list[bytes]], Awaitable[None]]) -> list[bytes]:
    """Receives the next messages while the last ones are taken. Returns those at the end, to be taken by the caller."""
    waiting: list[bytes] = []
    taking: asyncio.Future[None] | None = None
    async for message in stream:
        if len(waiting) == UPLOAD_BATCH:
            if taking is not None:
                await taking
            taking, waiting = asyncio.ensure_future(take(waiting)), []
        waiting.append(message)
    if taking is not None:
        await taking
    return waiting


def announced_in(data: bytes) -> pb.OpenUploadRequest:
    try:
        return pb.OpenUploadRequest.FromString(data)
    except DecodeError:
        raise BadRequest(f"{wire.ANNOUNCED_METADATA} is not a serialized OpenUploadRequest") from None


def outcome(receipt: Receipt) -> pb.Outcome.ValueType:
    if receipt.counted:
        return pb.OUTCOME_COUNTED
    return pb.OUTCOME_HISTORY if receipt.in_history else pb.OUTCOME_IGNORED


def receipt_out(receipt: Receipt) -> pb.Receipt:
    return pb.Receipt(
        round=receipt.round,
        digest=receipt.digest,
        outcome=outcome(receipt),
        durable=receipt.durable,
        reason=receipt.reason,
    )
