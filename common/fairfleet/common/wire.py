"""Between our types and the generated messages, one function each way. Beside this, only services know the latter."""

from __future__ import annotations

from fairfleet.common.errors import BadRequest
from fairfleet.common.plan import Plan
from fairfleet.common.reports import Evaluation, TrainReport
from fairfleet.common.tensors import Section, Signature, TensorSpec
from fairfleet.proto.v1 import fleet_pb2 as pb
from fairfleet.proto.v1 import model_pb2
from pydantic import ValidationError

PROTOCOL_VERSION = 1
UPLOAD_METADATA = "fairfleet-upload-bin"

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
        return TrainReport(
            samples=message.samples,
            loss_before=message.loss_before,
            loss_after=message.loss_after,
            steps=message.steps,
            learning_rate=message.learning_rate,
            gradient_norm=message.gradient_norm if message.HasField("gradient_norm") else None,
            seconds=message.seconds,
        )
    except ValidationError as error:
        raise BadRequest(f"the training report is not usable: {_mistakes(error)}") from None


def evaluation_out(evaluation: Evaluation) -> pb.Evaluation:
    return pb.Evaluation(**evaluation.model_dump(exclude_none=True))


def evaluation_in(message: pb.Evaluation) -> Evaluation:
    try:
        accuracy = message.accuracy if message.HasField("accuracy") else None
        return Evaluation(samples=message.samples, loss=message.loss, accuracy=accuracy)
    except ValidationError as error:
        raise BadRequest(f"the evaluation is not usable: {_mistakes(error)}") from None


def plan_out(plan: Plan) -> pb.Plan:
    fields = plan.model_dump(exclude={"solver", "epochs"})
    return pb.Plan(**fields, epochs=0 if plan.steps else max(plan.epochs, 1), solver=_SOLVERS[plan.solver])


def plan_in(message: pb.Plan) -> Plan:
    fields = {field.name: getattr(message, field.name) for field in message.DESCRIPTOR.fields}
    solver = next((name for name, value in _SOLVERS.items() if value == message.solver), str(message.solver))
    try:
        return Plan(**{**fields, "solver": solver})
    except ValidationError as error:
        raise BadRequest(f"the server's plan is not usable: {_mistakes(error)}") from None


def _mistakes(error: ValidationError) -> str:
    return "; ".join(f"{'.'.join(map(str, m['loc']))}: {m['msg']}, found {m['input']!r}" for m in error.errors())
