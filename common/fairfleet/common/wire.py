"""Convert between our types and the generated messages, with one function for each direction.

Apart from this module, only the gRPC services and their callers use the generated classes. Every
`*_in` function checks what a peer sent, and raises BadRequest if the message is not usable.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from google.protobuf.message import Message
from pydantic import ValidationError

from fairfleet.common.errors import BadReport, BadRequest, short
from fairfleet.common.features import SPOKEN
from fairfleet.common.privacy import PrivacyTerms, ReportTerms
from fairfleet.common.reports import (
    MAX_LOSS,
    MAX_MEASURES,
    Better,
    Evaluation,
    Measure,
    TrainReport,
)
from fairfleet.common.tensors import Section, Signature, TensorSpec
from fairfleet.common.training_plan import LossMeasurement, LossPlan, Plan
from fairfleet.proto.v1 import fleet_pb2 as pb
from fairfleet.proto.v1 import model_pb2

PROTOCOL_VERSION = SPOKEN.newest
MAX_DIMENSIONS = 64  # the limit of numpy
MOST_HALVINGS = 64  # of a step that clients evaluate
MAX_MISTAKES_SHOWN = 5

# Names of gRPC metadata.
UPLOAD_METADATA = "fairfleet-upload-bin"  # the token of an opened upload
# The OpenUploadRequest of an upload that is opened and sent in one call.
ANNOUNCED_METADATA = "fairfleet-announced-bin"
TASK_METADATA = "fairfleet-task-bin"  # the NextTaskResponse, at the end of TakeTask
RETRY_METADATA = "fairfleet-retry-seconds"  # when the same call may succeed, with an error
# The digest of the update that has the receipt, when another update is refused because of it.
STANDING_METADATA = "fairfleet-standing-bin"
# Sent with every error that the server itself reports, and with no error that gRPC reports.
ERROR_METADATA = "fairfleet-error"

_DIRECTIONS: dict[Better, pb.Direction.ValueType] = {
    "higher": pb.DIRECTION_HIGHER,
    "lower": pb.DIRECTION_LOWER,
}
_SOLVERS = {"sgd": pb.SOLVER_SGD, "adam": pb.SOLVER_ADAM}
MEASUREMENTS: dict[LossMeasurement, pb.LossMeasurement.ValueType] = {
    "exact": pb.LOSS_MEASUREMENT_EXACT,
    "batches": pb.LOSS_MEASUREMENT_BATCHES,
    "sampled": pb.LOSS_MEASUREMENT_SAMPLED,
    "none": pb.LOSS_MEASUREMENT_NONE,
}
_LOSS_PLAN_FIELDS = ("loss_before", "loss_after", "loss_samples")


def signature_out(signature: Signature) -> model_pb2.Signature:
    """Return the message of a model's signature."""
    return model_pb2.Signature(
        tensors=[
            model_pb2.TensorSpec(
                name=t.name,
                shape=t.shape,
                dtype=t.dtype,
                section=int(t.section),  # type: ignore[arg-type]  # the generated enum's own type
                layer=t.layer,
            )
            for t in signature.tensors
        ]
    )


def signature_in(message: model_pb2.Signature) -> Signature:
    """Return the signature of a message. Raises BadRequest if it is not usable."""
    # Check the number of dimensions before their product is computed or quoted in a message.
    dimensions = max((len(t.shape) for t in message.tensors), default=0)
    if dimensions > MAX_DIMENSIONS:
        raise BadRequest(
            f"the signature has a tensor of {dimensions} dimensions; "
            f"at most {MAX_DIMENSIONS} are allowed"
        )
    try:
        return Signature(
            tuple(
                TensorSpec(t.name, tuple(t.shape), t.dtype, Section(t.section), t.layer)
                for t in message.tensors
            )
        )
    except ValueError as error:
        raise BadRequest(f"the signature names a section that does not exist: {error}") from None


def report_out(report: TrainReport) -> pb.TrainReport:
    """Return the message of a training report."""
    fields = report.model_dump(exclude_none=True, exclude={"loss_measurement"})
    measurement = MEASUREMENTS[report.loss_measurement]
    return pb.TrainReport(**fields, loss_measurement=measurement)


def report_in(message: pb.TrainReport) -> TrainReport:
    """Return the training report of a message. Raises BadReport if it is not usable."""
    fields = _fields(message) | {"loss_measurement": _measurement_in(message.loss_measurement)}
    try:
        return TrainReport(**fields)
    except ValidationError as error:
        raise BadReport(f"the training report is not usable: {_mistakes(error)}") from None


def measured_as(reports: Iterable[pb.TrainReport]) -> str:
    """Return how the losses before were measured: exact, batches, sampled, or else mixed."""
    names = {_measurement_in(report.loss_measurement) for report in reports}
    return names.pop() if len(names) == 1 else "mixed" if names else "exact"


def evaluation_out(evaluation: Evaluation) -> pb.Evaluation:
    """Return the message of an evaluation."""
    named = {"measures", "personal_measures"}
    message = pb.Evaluation(**evaluation.model_dump(exclude_none=True, exclude=named))
    message.measures.extend(_measures_out(evaluation.measures))
    message.personal_measures.extend(_measures_out(evaluation.personal_measures))
    return message


def _measures_out(measures: Mapping[str, Measure]) -> list[pb.Measure]:
    return [
        pb.Measure(name=name, value=measure.value, direction=_DIRECTIONS[measure.direction])
        for name, measure in measures.items()
    ]


def evaluation_in(message: pb.Evaluation, *, names_measures: bool = True) -> Evaluation:
    """Return the evaluation of a message. Raises BadRequest if it is not usable.

    Losses and measures are clipped to MAX_LOSS: a model that diverges is not the client's mistake.
    A sender without the feature `measures` always has a loss, and leaves it out where it is 0.
    """
    fields = _fields(message)
    if not names_measures:
        fields.setdefault("loss", 0.0)
    for name in ("loss", "personal_loss"):
        if name in fields:
            fields[name] = _clipped(fields[name])
    for name in ("measures", "personal_measures"):
        fields[name] = _measures_in(fields[name])
    try:
        return Evaluation(**fields)
    except ValidationError as error:
        raise BadRequest(f"the evaluation is not usable: {_mistakes(error)}") from None


def _measures_in(messages: Sequence[pb.Measure]) -> dict[str, dict[str, Any]]:
    """Return the fields of measures by name; raise BadRequest if two have the same name."""
    if len(messages) > MAX_MEASURES:
        raise BadRequest(
            f"the evaluation is not usable: it has {len(messages)} measures; "
            f"at most {MAX_MEASURES} are allowed"
        )
    measures = {
        measure.name: {
            "value": _clipped(measure.value),
            "direction": direction_in(measure.direction),
        }
        for measure in messages
    }
    if len(measures) < len(messages):
        raise BadRequest("the evaluation is not usable: two of its measures have the same name")
    return measures


def _clipped(value: float) -> float:
    """Return a value within MAX_LOSS; NaN and infinity stay, to be refused."""
    return min(max(value, -MAX_LOSS), MAX_LOSS) if math.isfinite(value) else value


def direction_in(direction: int) -> str:
    """Return which values are better; the number as text for an unknown direction."""
    names = {number: name for name, number in _DIRECTIONS.items()}
    return names.get(direction, str(direction))  # type: ignore[call-overload, no-any-return]


def direction_out(direction: Better) -> pb.Direction.ValueType:
    """Return the number of a direction."""
    return _DIRECTIONS[direction]


def plan_out(plan: Plan, losses: LossPlan | None = None) -> pb.Plan:
    """Return the message of a training plan. A plan without a length becomes one epoch.

    The message has no decay: `Plan.for_client` applies it to the learning rate.
    """
    fields = plan.model_dump(exclude={"solver", "epochs", "learning_rate_decay"})
    losses = losses or LossPlan()
    return pb.Plan(
        **fields,
        epochs=0 if plan.steps else max(plan.epochs, 1),
        solver=_SOLVERS[plan.solver],
        loss_before=MEASUREMENTS[losses.before],
        loss_after=MEASUREMENTS[losses.after],
        loss_samples=losses.samples,
    )


def plan_in(message: pb.Plan) -> Plan:
    """Return the training plan of a message. Raises BadRequest if it is not usable."""
    fields = _fields(message)
    for name in _LOSS_PLAN_FIELDS:  # `loss_plan_in` reads them
        fields.pop(name, None)
    solver = next(
        (name for name, value in _SOLVERS.items() if value == message.solver), str(message.solver)
    )
    try:
        return Plan(**{**fields, "solver": solver})
    except ValidationError as error:
        raise BadRequest(f"the server's plan is not usable: {_mistakes(error)}") from None


def loss_plan_in(message: pb.Plan) -> LossPlan:
    """Return how the losses are to be measured. Raises BadRequest if the plan is not usable.

    A server that is older than these fields leaves them out: both losses exactly.
    """
    try:
        return LossPlan(
            before=_measurement_in(message.loss_before),
            after=_measurement_in(message.loss_after),
            samples=message.loss_samples,
        )
    except ValidationError as error:
        raise BadRequest(f"the server's plan is not usable: {_mistakes(error)}") from None


def _measurement_in(value: pb.LossMeasurement.ValueType) -> Any:
    """Return the name of a measurement, or the number as text if it has none here."""
    names = {number: name for name, number in MEASUREMENTS.items()}
    return names.get(value or pb.LOSS_MEASUREMENT_EXACT, str(value))


def privacy_out(terms: PrivacyTerms | None) -> pb.Privacy | None:
    """Return the message of privacy terms, or None if there are none."""
    if terms is None:
        return None
    reports = pb.ReportNoise(**terms.reports.model_dump()) if terms.reports else None
    return pb.Privacy(clip=terms.clip, noise_multiplier=terms.noise_multiplier, reports=reports)


def privacy_in(message: pb.Privacy) -> PrivacyTerms:
    """Return the privacy terms of a message. Raises BadRequest if they are not usable.

    A field that is left out means that this protection is not required, or was not applied.
    """
    try:
        reports = ReportTerms(**_fields(message.reports)) if message.HasField("reports") else None
        return PrivacyTerms(
            clip=message.clip, noise_multiplier=message.noise_multiplier, reports=reports
        )
    except ValidationError as error:
        raise BadRequest(f"the terms of privacy are not usable: {_mistakes(error)}") from None


def _fields(message: Message) -> dict[str, Any]:
    """Return the fields by name, without optional fields that are left out."""
    return {
        field.name: getattr(message, field.name)
        for field in message.DESCRIPTOR.fields
        if not field.has_presence or message.HasField(field.name)
    }


def _mistakes(error: ValidationError) -> str:
    """Describe the first mistakes. A peer's values may be long, so they are shortened."""
    return "; ".join(
        f"{'.'.join(map(str, mistake['loc']))}: {mistake['msg']}, "
        f"found {short(repr(mistake['input']))}"
        for mistake in error.errors()[:MAX_MISTAKES_SHOWN]
    )
