"""The Fleet service: each method translates, calls one plain function of the coordinator, translates back."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from typing import Any

from google.protobuf.message import DecodeError

from fairfleet.common import wire
from fairfleet.common.codecs import is_predicted, needs
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
from fairfleet.common.identity import is_name
from fairfleet.proto.v1 import fleet_pb2 as pb
from fairfleet.server.callers import Call, caller, check_speaks_for
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

MOST_LETTERS = 64
MOST_CODECS = 64
RAW_STREAMS = frozenset({"TakeTask", "FetchModel", "SendUpload"})


class FleetService:
    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator
        self._codecs = coordinator.settings.codec_policy(raw_bytes(coordinator.signature))
        self._uplinks = Uplinks()
        self._signature = wire.signature_out(coordinator.signature)  # made once: a whole fleet may join at a time
        wanted = coordinator.settings.privacy
        self._privacy = wire.privacy_out(wanted.terms(coordinator.recipe)) if wanted else None

    def admit(self, request: Any) -> None:
        """Counts calls in the clear, by the session they name; `authorization` has counted those of certificates.

        Join has no session yet, and a limit of its own.
        """
        if caller.get() is None and not isinstance(request, pb.JoinRequest):
            with contextlib.suppress(SessionUnknown):  # which is for the call itself to tell
                self._count(self._coordinator.session(request.session).client)

    def _count(self, client: str) -> None:
        self._coordinator.gate.calls.take(client, asyncio.get_running_loop().time())

    async def Join(self, request: pb.JoinRequest, context: Context) -> pb.JoinResponse:  # noqa: N802
        if request.protocol_version != wire.PROTOCOL_VERSION:
            raise WrongState(
                f"client {short(request.client)} speaks protocol version {request.protocol_version}; "
                f"this server speaks {wire.PROTOCOL_VERSION}. Upgrade the older side."
            )
        if not is_name(request.client):
            raise BadRequest(f"client name {short(request.client)!r} is not 1 to 64 of a-z A-Z 0-9 . _ -")
        check_words(request)
        self._check_model(request)
        if self._privacy is not None and not request.protects:
            raise WrongState(
                f"client {request.client} knows nothing of the noise that this federation asks of its clients; "
                "install a newer fairfleet there"
            )
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
            request.predicts,
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
            privacy=self._privacy,
            brings_models=True,
        )

    def _check_model(self, request: pb.JoinRequest) -> None:
        found, expected = len(request.signature.tensors), len(self._signature.tensors)
        if found > 2 * expected + 1000:  # too many to look for the first that differs: each would be an object of ours
            raise BadRequest(f"the model of {request.client} has {found} tensors; this federation's has {expected}")
        if request.HasField("signature") and request.signature != self._signature:
            difference = self._coordinator.signature.difference(wire.signature_in(request.signature))
            if difference:
                raise BadRequest(
                    f"the model of client {request.client} is not this federation's: {difference}. "
                    "Give the client the task that the federation was initialised with."
                )

    async def NextTask(self, request: pb.NextTaskRequest, context: Context) -> pb.NextTaskResponse:  # noqa: N802
        return self._answer(request.session, await self._coordinator.next_task(request.session))

    async def TakeTask(self, request: pb.TakeTaskRequest, context: Context) -> AsyncIterator[bytes]:  # noqa: N802
        coordinator = self._coordinator
        model = await coordinator.next_model(request.session)
        if model is not None and model.digest != request.held and not self._shorter(model):
            with self._downloading(request.session, context) as call:
                for message in self._counted(model.messages_from(0), model.codec):
                    with call.sending():
                        yield message
        answer = self._answer(request.session, await coordinator.task_of_model(request.session))
        context.set_trailing_metadata(((wire.TASK_METADATA, answer.SerializeToString()),))

    def _shorter(self, model: Publication) -> bool:
        """Whether clients may have it in another form, or none may have it any more."""
        return bool(self._coordinator.downlink.changes or model.compact or model.retired)

    def _answer(self, session: str, assignment: Assignment | None) -> pb.NextTaskResponse:
        coordinator = self._coordinator
        if coordinator.stopping:
            raise TryLater("the server is stopping; try again")
        if assignment is not None:
            return self._task(session, assignment)
        if coordinator.round.phase is Phase.FINISHED:
            coordinator.told_finished(session)
            return pb.NextTaskResponse(finished=pb.Finished(reason=coordinator.round.stopping))
        return pb.NextTaskResponse(wait=pb.Wait(retry_after_seconds=coordinator.send_away(session)))

    def _task(self, session: str, assignment: Assignment) -> pb.NextTaskResponse:
        coordinator, publication = self._coordinator, self._coordinator.publication
        member = coordinator.session(session).member
        model = pb.ModelRef(
            version=publication.version,
            digest=publication.digest,
            size_bytes=publication.size_bytes,
            changes=self._changes(member),
            compact=self._compact(member),
        )
        left = max(0.0, assignment.ends - asyncio.get_running_loop().time())
        if assignment.kind == "evaluate":
            task = pb.EvaluateTask(id=assignment.id, model=model, seconds_left=left, privacy=self._privacy)
            return pb.NextTaskResponse(evaluate=task)
        if assignment.kind == "verify":
            return self._verify_task(assignment, model, left)
        plan = coordinator.plan.for_client(member.client, assignment.version)
        codec = self._codecs.choose(member.client, member.codecs, self._uplinks.of(member.client))
        return pb.NextTaskResponse(
            train=pb.TrainTask(
                id=assignment.id,
                round=assignment.version,
                model=model,
                plan=wire.plan_out(plan),
                codec=codec,
                seconds_left=left,
                report_gradient_norm="gradient_norm" in coordinator.recipe.rule.needs().reports,
                error_feedback=coordinator.settings.compression.error_feedback,
                prediction=self._prediction(member, codec),
                privacy=self._privacy,
            )
        )

    def _prediction(self, member: Member, codec: str) -> pb.Prediction | None:
        if not (self._coordinator.predicts and member.predicts and is_predicted(codec)):
            return None
        return pb.Prediction(base=self._coordinator.bases.digest_of(member.client))

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

    def _compact(self, member: Member) -> pb.Compact | None:
        found = self._coordinator.publication.compact
        if found is None or not needs(found.codec) <= set(member.codecs):
            return None
        return pb.Compact(codec=found.codec, digest=found.digest, size_bytes=found.size_bytes)

    def _change(self, change: Publication) -> pb.Change:
        steady = self._coordinator.downlink.steady
        return pb.Change(
            version=change.version,
            digest=change.digest,
            size_bytes=change.size_bytes,
            codec=self._coordinator.downlink.codec,
            halvings=change.halvings,
            rounded=steady.name if steady else "",
        )

    async def FetchModel(self, request: pb.FetchModelRequest, context: Context) -> AsyncIterator[bytes]:  # noqa: N802
        self._coordinator.session(request.session)
        publication = self._published(request)
        codec = self._coordinator.downlink.codec if request.change else publication.codec
        with self._downloading(request.session, context) as call:
            for message in self._counted(publication.messages_from(request.offset_bytes), codec):
                with call.sending():
                    yield message

    @contextlib.contextmanager
    def _downloading(self, session: str, context: Context) -> Iterator[Call]:
        client, downloads = self._coordinator.session(session).client, self._coordinator.gate.downloads
        downloads.take(client)
        # Not sooner: till then gRPC may hold a message. (The stubs think of grpc's other kind of context.)
        context.add_done_callback(lambda _: downloads.give_back(client))  # type: ignore[arg-type]
        with self._coordinator.transferring(client) as call:
            yield call

    def _counted(self, messages: Iterable[bytes], codec: str) -> Iterator[bytes]:
        for message in messages:
            yield message
            self._coordinator.traffic.gave(codec, len(message))

    def _published(self, request: pb.FetchModelRequest) -> Publication:
        newest = self._coordinator.publication
        whole = newest.compact if request.compact else newest
        kept = self._kept_changes() if request.change else (whole,)
        publication = next((found for found in kept if found and found.version == request.version), None)
        if publication is None:
            raise NotKept(
                f"{'the change to ' * request.change}version {request.version} is not published; the newest is "
                f"{newest.version}. Ask for the next task."
            )
        return publication

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
            said = wire.report_in(request.report), wire.privacy_in(request.privacy)
            named = (request.codec, request.size_bytes, request.digest)
            announced = Announced(client, request.round, *named, *said, request.base)
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
            announced = announced_in(metadata[wire.ANNOUNCED_METADATA])
            self.admit(announced)
            opened = await self._open(announced)
            if isinstance(opened, Receipt):
                return pb.SendUploadResponse(receipt=receipt_out(opened))
            if opened.offset_bytes:
                raise WrongState("a part of this update is here already; open it to learn where to go on")
            upload, token = opened, opened.token
        else:
            token = metadata.get(wire.UPLOAD_METADATA, b"")
            upload = uploads.under_way(token)
            check_speaks_for(upload.announced.client, "the upload is another client's")
            if caller.get() is None:
                self._count(upload.announced.client)
        client, gate = upload.announced.client, coordinator.gate
        try:
            with coordinator.transferring(client):
                async with gate.upload(client):
                    with self._counting_refusals():
                        with self._measuring(upload):
                            messages = gate.paced(stream, upload.announced.size_bytes - upload.offset_bytes)
                            rest = await _receive(
                                messages,
                                upload,
                                lambda some: uploads.take_chunks(upload, token, some),
                                lambda: gate.batch(upload.announced.size_bytes),
                            )
                        receipt = await uploads.complete(upload, token, rest)
                coordinator.traffic.outcomes["late"] += not receipt.counted
                return pb.SendUploadResponse(receipt=receipt_out(receipt))
        except LimitReached:
            raise
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
        except (BadRequest, Corrupted, LimitReached) as error:
            self._coordinator.traffic.refused(error)
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
        failure, made = short(request.failure, 300), wire.privacy_in(request.privacy)
        await self._coordinator.report_evaluation(request.session, request.version, evaluation, failure, made)
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
        told = request.steps_done, request.steps_planned, request.loss
        if self._privacy and self._privacy.HasField("reports"):
            told = (0, 0, 0.0)  # of a training that began before they were to be noised
        wanted = coordinator.progress(request.session, request.task, *told)
        return pb.HeartbeatResponse(abandon=not wanted, reason="" if wanted else "the round went on without it")

    async def Leave(self, request: pb.LeaveRequest, context: Context) -> pb.LeaveResponse:  # noqa: N802
        with contextlib.suppress(SessionUnknown):  # a repetition: it has left already
            await self._coordinator.leave(request.session, short(request.reason))
        return pb.LeaveResponse()


async def _receive(
    stream: AsyncIterator[bytes],
    upload: Upload,
    take: Callable[[list[bytes]], Awaitable[None]],
    batch: Callable[[], int],
) -> list[bytes]:
    """Receives the next messages while the last ones are taken. Returns those at the end, to be taken by the caller."""
    waiting: list[bytes] = []
    taking: asyncio.Future[None] | None = None
    async for message in stream:
        at_once = upload.takes_at_once
        if waiting and (at_once or len(waiting) >= batch()):
            if taking is not None:
                await taking
            taking = None
            if at_once:
                await take(waiting)
            else:
                taking = asyncio.ensure_future(take(waiting))
                taking.add_done_callback(_looked_at)
            waiting = []
        waiting.append(message)
    if taking is not None:
        await taking
    return waiting


def _looked_at(taken: asyncio.Future[None]) -> None:
    """Where the stream was cut off meanwhile, nobody else looks: asyncio would write a traceback to the log."""
    if not taken.cancelled():
        taken.exception()


def check_words(request: pb.JoinRequest) -> None:
    """What is kept of a client for as long as it is connected: no more than it needs to be."""
    if len(request.instance) > MOST_LETTERS:
        raise BadRequest(f"instance has {len(request.instance)} characters; at most {MOST_LETTERS} are allowed")
    if len(request.codecs) > MOST_CODECS or any(len(codec) > MOST_LETTERS for codec in request.codecs):
        raise BadRequest(
            f"found {len(request.codecs)} codecs; at most {MOST_CODECS} of {MOST_LETTERS} characters each are allowed"
        )


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
