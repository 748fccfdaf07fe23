"""Between our types and the generated messages, one function each way. Beside this, only services know the latter."""

from __future__ import annotations

from typing import Any

from google.protobuf.message import Message
from pydantic import ValidationError

from fairfleet.common.errors import BadReport, BadRequest, short
from fairfleet.common.plan import Plan
from fairfleet.common.privacy import ReportTerms, Terms
from fairfleet.common.reports import Evaluation, TrainReport
from fairfleet.common.tensors import Section, Signature, TensorSpec
from fairfleet.proto.v1 import fleet_pb2 as pb
from fairfleet.proto.v1 import model_pb2

PROTOCOL_VERSION = 1
MOST_DIMENSIONS = 64  # as in numpy
MISTAKES_TOLD = 5
UPLOAD_METADATA = "fairfleet-upload-bin"  # of an upload that was opened: its token
ANNOUNCED_METADATA = "fairfleet-announced-bin"  # of one that is opened and sent in one call: its OpenUploadRequest
TASK_METADATA = "fairfleet-task-bin"  # at the end of TakeTask: the NextTaskResponse
RETRY_METADATA = "fairfleet-retry-seconds"  # of an error after which the same call may succeed: when
ERROR_METADATA = "fairfleet-error"  # goes with every error that is the server's own word, and with no other

_SOLVERS = {"sgd": pb.SOLVER_SGD, "adam": pb.SOLVER_ADAM}


def signature_out(signature: Signature) -> model_pb2.Signature:
    return model_pb2.Signature(
        tensors=[
            model_pb2.TensorSpec(
                name=t.name,
                shape=t.shape,
                dtype=t.dtype,
                section=int(t.section),  # type: ignore[arg-type]  # the generated enum's type is its own
                layer=t.layer,
            )
            for t in signature.tensors
        ]
    )


def signature_in(message: model_pb2.Signature) -> Signature:
    most = max((len(t.shape) for t in message.tensors), default=0)
    if most > MOST_DIMENSIONS:  # before sizes of such are multiplied, or written into a message
        raise BadRequest(f"the signature has a tensor of {most} dimensions; at most {MOST_DIMENSIONS} are allowed")
    try:
        return Signature(
            tuple(TensorSpec(t.name, tuple(t.shape), t.dtype, Section(t.section), t.layer) for t in message.tensors)
        )
    except ValueError as error:
        raise BadRequest(f"the signature names a section that does not exist: {error}") from None


def report_out(report: TrainReport) -> pb.TrainReport:
    return pb.TrainReport(**report.model_dump(exclude_none=True))


def report_in(message: pb.TrainReport) -> TrainReport:
    try:
        return TrainReport(**_fields(message))
    except ValidationError as error:
        raise BadReport(f"the training report is not usable: {_mistakes(error)}") from None


def evaluation_out(evaluation: Evaluation) -> pb.Evaluation:
    return pb.Evaluation(**evaluation.model_dump(exclude_none=True))


def evaluation_in(message: pb.Evaluation) -> Evaluation:
    try:
        return Evaluation(**_fields(message))
    except ValidationError as error:
        raise BadRequest(f"the evaluation is not usable: {_mistakes(error)}") from None


def plan_out(plan: Plan) -> pb.Plan:
    fields = plan.model_dump(exclude={"solver", "epochs"})
    return pb.Plan(**fields, epochs=0 if plan.steps else max(plan.epochs, 1), solver=_SOLVERS[plan.solver])


def plan_in(message: pb.Plan) -> Plan:
    fields = _fields(message)
    solver = next((name for name, value in _SOLVERS.items() if value == message.solver), str(message.solver))
    try:
        return Plan(**{**fields, "solver": solver})
    except ValidationError as error:
        raise BadRequest(f"the server's plan is not usable: {_mistakes(error)}") from None


def privacy_out(terms: Terms | None) -> pb.Privacy | None:
    if terms is None:
        return None
    reports = pb.ReportNoise(**terms.reports.model_dump()) if terms.reports else None
    return pb.Privacy(clip=terms.clip, noise_multiplier=terms.noise_multiplier, reports=reports)


def privacy_in(message: pb.Privacy) -> Terms:
    """Where it is left out, nothing is to be done, or was."""
    try:
        reports = ReportTerms(**_fields(message.reports)) if message.HasField("reports") else None
        return Terms(clip=message.clip, noise_multiplier=message.noise_multiplier, reports=reports)
    except ValidationError as error:
        raise BadRequest(f"the terms of privacy are not usable: {_mistakes(error)}") from None


def _fields(message: Message) -> dict[str, Any]:
    """By name, without optional ones that are left out."""
    return {
        field.name: getattr(message, field.name)
        for field in message.DESCRIPTOR.fields
        if not field.has_presence or message.HasField(field.name)
    }


def _mistakes(error: ValidationError) -> str:
    """What came from a peer may be as long as a message: it is not sent back whole."""
    found = error.errors()[:MISTAKES_TOLD]
    return "; ".join(f"{'.'.join(map(str, m['loc']))}: {m['msg']}, found {short(repr(m['input']))}" for m in found)
