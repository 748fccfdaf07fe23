"""What a client sends of an evaluation, to servers with and without named measures."""

from __future__ import annotations

from typing import Any

import pytest

from fairfleet.client import Evaluation, higher
from fairfleet.client.agent.result_reports import report_evaluation
from fairfleet.common import wire
from fairfleet.common.errors import BadRequest
from fairfleet.common.privacy import PrivacyTerms, ReportTerms
from fairfleet.proto.v1 import fleet_pb2 as pb

REQUEST = pb.EvaluateTask(id="ann:3", model=pb.ModelRef(version=3))
AUC_ONLY = Evaluation(samples=9, measures={"auc": higher(0.9)})
NOISED = wire.privacy_out(
    PrivacyTerms(
        clip=1.0,
        noise_multiplier=1.0,
        reports=ReportTerms(noise_multiplier=0.5, loss_bound=4.0, gradient_bound=8.0),
    )
)


class ReportedConnection:
    """A connection that keeps what is reported; it may refuse the first report."""

    def __init__(self, features: list[str], refusal: Exception | None = None) -> None:
        self.joined, self.federation_id = pb.JoinResponse(features=features), "id"
        self.reports: list[dict[str, Any]] = []
        self._refusal = refusal

    def report_evaluation(self, **fields: Any) -> None:
        if self._refusal and not self.reports:
            self.reports.append({})
            raise self._refusal
        self.reports.append(fields)


class UnlimitedAllowance:
    """A ledger that charges nothing."""

    def charge_evaluation(self, *charged: Any) -> None:
        pass


def reports_of(
    evaluation: Evaluation, connection: ReportedConnection, request: pb.EvaluateTask = REQUEST
) -> list[dict[str, Any]]:
    report_evaluation(connection, UnlimitedAllowance(), request, evaluation)  # type: ignore[arg-type]
    return connection.reports


def test_an_evaluation_without_a_loss_goes_only_to_a_server_that_understands_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    (sent,) = reports_of(AUC_ONLY, ReportedConnection(["measures"]))
    assert not sent["evaluation"].HasField("loss")
    (sent,) = reports_of(AUC_ONLY, ReportedConnection([]))
    assert "evaluation" not in sent
    assert sent["failure"]
    assert "this server is too old for evaluations without one" in caplog.text


def test_an_older_server_gets_loss_and_accuracy_as_before() -> None:
    evaluation = Evaluation(samples=9, loss=0.5, accuracy=0.8, measures={"auc": higher(0.9)})
    (sent,) = reports_of(evaluation, ReportedConnection([]))
    assert (sent["evaluation"].loss, sent["evaluation"].accuracy) == (0.5, 0.8)


def test_a_refused_evaluation_is_a_failure_and_not_the_end_of_the_client(
    caplog: pytest.LogCaptureFixture,
) -> None:
    connection = ReportedConnection(["measures"], BadRequest("auc has another direction"))
    sent = reports_of(AUC_ONLY, connection)[-1]
    assert "evaluation" not in sent
    assert "direction" not in sent["failure"]  # the server knows why
    assert "auc has another direction" in caplog.text


def test_with_noise_on_reports_measures_of_unknown_range_are_left_out(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    request = pb.EvaluateTask(id="ann:3", model=pb.ModelRef(version=3), privacy=NOISED)
    evaluation = Evaluation(samples=9, loss=0.5, measures={"auc": higher(0.9)})
    connection = ReportedConnection(["measures"])
    (sent,) = reports_of(evaluation, connection, request)
    assert not sent["evaluation"].measures
    assert sent["evaluation"].loss != 0.5
    assert "noise protects only loss and accuracy: auc" in caplog.text
    (sent,) = reports_of(AUC_ONLY, ReportedConnection(["measures"]), request)
    assert "evaluation" not in sent
    assert "an evaluation needs a loss or an accuracy; found auc" in caplog.text
