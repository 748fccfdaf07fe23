"""Every notable event has one line of text; routine and unknown events have none."""

from __future__ import annotations

from typing import Any

import pytest

from fairfleet.common.cli.event_text import headline
from fairfleet.proto.v1 import operator_pb2 as pb

FAILURE = "ValueError: no data"
RECORD = pb.RoundRecord(
    round=4,
    contributions=[pb.ClientContribution(client="ann")],
    dropped=["bob"],
    admission=[
        pb.AdmissionFinding(client="cyd", check="norm", decision="rejected"),
        pb.AdmissionFinding(client="dan", check="norm", decision="rejected", stood_in=True),
    ],
)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (
            {"client_joined": pb.ClientJoined(client="ann", train_samples=1, connected=3)},
            "ann joined with 1 sample; 3 connected",
        ),
        (
            {"client_gone": pb.ClientGone(client="ann", reason="left", connected=2)},
            "ann is gone (left); 2 connected",
        ),
        (
            {"client_gone": pb.ClientGone(client="ann", reason="spent", connected=2, retired=True)},
            "ann has retired (spent); 2 connected",
        ),
        ({"round_started": pb.RoundStarted(clients=["ann"])}, "round 5: 1 client selected"),
        (
            {"round_started": pb.RoundStarted(clients=["ann", "bob"], attempt=1)},
            "round 5, attempt 2: 2 more clients selected",
        ),
        (
            {"round_committed": pb.RoundCommitted(record=RECORD)},
            "round 5 committed, 1 update, without bob; rejected: cyd",
        ),
        (
            {"step_tried": pb.StepTried(client="ann", failure=FAILURE)},
            f"ann could not try the step: {FAILURE}",
        ),
        (
            {"evaluation_reported": pb.EvaluationReported(client="ann", failure=FAILURE)},
            f"ann could not evaluate: {FAILURE}",
        ),
        (
            {"evaluation_finished": pb.EvaluationFinished(reported=1, asked=2)},
            "version 4 evaluated by 1 of 2 clients",
        ),
        (
            {"evaluation_finished": pb.EvaluationFinished()},
            "version 4 was not evaluated: no connected client has test data",
        ),
        (
            {"federation_finished": pb.FederationFinished(reason="all rounds are done")},
            "finished: all rounds are done",
        ),
        ({"update_received": pb.UpdateReceived(client="ann")}, None),
        ({"step_tried": pb.StepTried(client="ann")}, None),
        ({"evaluation_reported": pb.EvaluationReported(client="ann")}, None),
        ({}, None),
    ],
)
def test_an_event_has_the_line_that_people_need(kind: dict[str, Any], text: str | None) -> None:
    assert headline(pb.Event(round=4, **kind)) == text
