"""Messages of the Fleet service: check what a client sent, and convert it from and to our types.

Every `check_*` and `*_in` function raises BadRequest if a message is wrong in every state of the
server. None of them looks at the federation.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from google.protobuf.message import DecodeError

from fairfleet.common import wire
from fairfleet.common.errors import BadReport, BadRequest, WrongState, short
from fairfleet.common.features import MEASURES, SPOKEN, VersionRange, newest_common
from fairfleet.common.names import check_name
from fairfleet.common.reports import Evaluation
from fairfleet.proto.v1 import fleet_pb2 as pb
from fairfleet.server.federation.clients.assignments import is_task_of
from fairfleet.server.federation.clients.sessions import ClientDescription
from fairfleet.server.federation.receipts import Receipt
from fairfleet.server.storage.quarantine import QuarantinedUpdate
from fairfleet.server.transfer.upload import AnnouncedUpdate

MAX_TEXT_CHARS = 64  # of a text that is stored while a client is connected
MAX_CODECS = MAX_FEATURES = 64
MAX_FAILURE_CHARS = 300


def spoken_version(request: pb.JoinRequest) -> int:
    """Return the newest protocol version that the client and this server both speak.

    Raises WrongState if there is none.
    """
    newest = request.protocol_version
    spoken = VersionRange(request.oldest_protocol_version or newest, newest)
    if spoken.oldest > spoken.newest:
        raise BadRequest(
            f"oldest_protocol_version is {spoken.oldest}, above protocol_version {spoken.newest}"
        )
    if (version := newest_common(SPOKEN, spoken)) is None:
        side = "client" if spoken.newest < SPOKEN.oldest else "server"
        raise WrongState(
            f"client {short(request.client)} speaks protocol version {spoken}; this server "
            f"speaks {SPOKEN}. Upgrade the {side}."
        )
    return version


def description_in(request: pb.JoinRequest) -> ClientDescription:
    """Return what a client reports about itself. Everything in it is limited in size."""
    version = spoken_version(request)
    check_name(request.client, "client name", BadRequest)
    _check_instance(request.instance)
    _check_names(request.codecs, "codecs", MAX_CODECS)
    _check_names(request.features, "features", MAX_FEATURES)
    return ClientDescription(
        request.client,
        request.instance,
        short(request.device),
        request.train_samples,
        request.test_samples,
        tuple(request.codecs),
        request.verifies,
        request.since,
        request.predicts,
        short(request.software, MAX_TEXT_CHARS),
        frozenset(request.features),
        version,
    )


def _check_instance(instance: str) -> None:
    if not instance:
        raise BadRequest(
            "instance is empty; expected a random text that this process keeps while it runs"
        )
    if len(instance) > MAX_TEXT_CHARS:
        raise BadRequest(
            f"instance has {len(instance)} characters; at most {MAX_TEXT_CHARS} are allowed"
        )


def _check_names(names: Collection[str], what: str, limit: int) -> None:
    if len(names) > limit or any(len(name) > MAX_TEXT_CHARS for name in names):
        raise BadRequest(
            f"found {len(names)} {what}; at most {limit} of {MAX_TEXT_CHARS} characters "
            "each are allowed"
        )


def announced_update(
    client: str, request: pb.OpenUploadRequest, *, is_private: bool
) -> AnnouncedUpdate:
    """Return what a client announces. Its privacy terms are ignored unless `is_private`."""
    if not request.HasField("report"):
        raise BadReport("report is missing; every update needs one")
    if not request.size_bytes:
        raise BadRequest("size_bytes is 0; expected the size of the encoded stream")
    return AnnouncedUpdate(
        client,
        request.round,
        request.codec,
        request.size_bytes,
        request.digest,
        wire.report_in(request.report),
        wire.privacy_in(request.privacy if is_private else pb.Privacy()),
        request.base,
    )


def announcement_in(data: bytes) -> pb.OpenUploadRequest:
    """Return the announcement in the metadata of an upload."""
    try:
        return pb.OpenUploadRequest.FromString(data)
    except DecodeError:
        raise BadRequest(
            f"{wire.ANNOUNCED_METADATA} is not a serialized OpenUploadRequest"
        ) from None


def upload_token(metadata: Mapping[str, Any]) -> bytes:
    """Return the token of the upload that a stream belongs to.

    A call without a token is refused with BadRequest, because repeating it does not help.
    """
    token: bytes = metadata.get(wire.UPLOAD_METADATA, b"")
    if not token:
        raise BadRequest(
            f"the call's metadata have no {wire.UPLOAD_METADATA}; send OpenUploadResponse.upload "
            f"as this, or the serialized OpenUploadRequest as {wire.ANNOUNCED_METADATA}"
        )
    return token


def check_task(client: str, request: pb.HeartbeatRequest) -> None:
    """Refuse a heartbeat about a task that this client cannot have.

    A heartbeat without a task is allowed: it only renews the lease.
    """
    if request.task and not is_task_of(client, request.task):
        raise BadRequest(
            f"task {short(request.task)!r} is none of client {client}; "
            "send the id of a task from NextTask unchanged"
        )
    if request.failure and not request.task:
        raise BadRequest("failure is set, but task is empty; name the task that failed")


def changed_counts(
    request: pb.NextTaskRequest | pb.TakeTaskRequest,
) -> tuple[int | None, int | None]:
    """Return the numbers of training and test samples that a poll tells; None: not told."""
    return (
        request.train_samples if request.HasField("train_samples") else None,
        request.test_samples if request.HasField("test_samples") else None,
    )


def evaluation_in(
    request: pb.ReportEvaluationRequest, features: Collection[str]
) -> Evaluation | None:
    """Return the evaluation of a request, or None if it reports a failure.

    `features` are those of the client.
    """
    if request.failure:
        return None
    if not request.HasField("evaluation"):
        raise BadRequest("evaluation and failure are both missing; send one of them")
    if not request.evaluation.samples:
        raise BadRequest("evaluation.samples is 0; expected the number of evaluated samples")
    return wire.evaluation_in(request.evaluation, names_measures=MEASURES in features)


def quarantined_out(update: QuarantinedUpdate) -> pb.QuarantinedUpdate:
    """Return the message that an update is in quarantine."""
    return pb.QuarantinedUpdate(round=update.round, digest=update.digest, reason=update.reason)


def receipt_out(receipt: Receipt) -> pb.Receipt:
    """Return the message of a receipt."""
    return pb.Receipt(
        round=receipt.round,
        digest=receipt.digest,
        outcome=_outcome(receipt),
        durable=receipt.durable,
        reason=receipt.reason,
    )


def _outcome(receipt: Receipt) -> pb.Outcome.ValueType:
    if receipt.counted:
        return pb.OUTCOME_COUNTED
    return pb.OUTCOME_HISTORY if receipt.in_history else pb.OUTCOME_IGNORED
