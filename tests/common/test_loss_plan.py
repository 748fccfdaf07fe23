"""How losses are to be measured, and how they were, crosses the wire without loss."""

import math

import pytest

from fairfleet.common import wire
from fairfleet.common.errors import BadReport, BadRequest
from fairfleet.common.reports import TrainReport
from fairfleet.common.training_plan import NO_PASSES, LossPlan, Plan
from fairfleet.proto.v1 import fleet_pb2 as pb

REPORT = TrainReport(samples=3, loss_before=1.0, steps=2, learning_rate=0.1)
SAMPLED = LossPlan(before="sampled", after="sampled", samples=500)


@pytest.mark.parametrize("losses", [LossPlan(), NO_PASSES, SAMPLED])
def test_a_loss_plan_is_read_as_it_was_sent(losses: LossPlan) -> None:
    message = wire.plan_out(Plan(steps=3), losses)

    assert wire.loss_plan_in(message) == losses
    assert wire.plan_in(message) == Plan(steps=3)


def test_an_older_server_requests_both_losses_exactly() -> None:
    message = pb.Plan(steps=1, batch_size=2, learning_rate=0.1)

    assert wire.loss_plan_in(message) == LossPlan(before="exact", after="exact")


@pytest.mark.parametrize("field", ["loss_before", "loss_after"])
def test_a_measurement_that_this_client_does_not_know_is_refused_by_name(field: str) -> None:
    message = pb.Plan(steps=1, learning_rate=0.1, **{field: 77})

    with pytest.raises(BadRequest, match=rf"{field.removeprefix('loss_')}: .*'77'"):
        wire.loss_plan_in(message)


def test_the_loss_of_the_received_model_is_always_wanted() -> None:
    with pytest.raises(BadRequest, match=r"before: .*'none'"):
        wire.loss_plan_in(pb.Plan(loss_before=pb.LOSS_MEASUREMENT_NONE))


@pytest.mark.parametrize(
    "changes",
    [
        {"loss_after": 0.5},
        {"loss_measurement": "batches"},
        {"loss_measurement": "sampled", "loss_standard_error": 0.25},
    ],
)
def test_a_report_keeps_how_its_loss_was_measured(changes: dict[str, object]) -> None:
    report = REPORT.model_copy(update=changes)

    assert wire.report_in(wire.report_out(report)) == report


def test_a_report_of_an_older_client_was_measured_exactly() -> None:
    older = pb.TrainReport(samples=1, loss_before=1.0, loss_after=0.5, learning_rate=0.1)

    report = wire.report_in(older)

    assert (report.loss_measurement, report.loss_standard_error) == ("exact", None)


def test_a_loss_after_training_that_was_left_out_is_not_zero() -> None:
    assert wire.report_in(pb.TrainReport(samples=1, loss_before=1.0)).loss_after is None


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("loss_measurement", 77),
        ("loss_measurement", pb.LOSS_MEASUREMENT_NONE),
        ("loss_standard_error", -1.0),
        ("loss_standard_error", math.nan),
        ("loss_standard_error", math.inf),
        ("loss_after", math.nan),
    ],
)
def test_a_report_with_an_impossible_measurement_is_refused(field: str, value: float) -> None:
    message = pb.TrainReport(samples=1, loss_before=1.0, **{field: value})

    with pytest.raises(BadReport, match=field):
        wire.report_in(message)
