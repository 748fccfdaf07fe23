"""Events as plain lines and as JSON."""

from __future__ import annotations

import json
import math

from fairfleet.client.operator.display import as_json
from fairfleet.client.operator.event_lines import lines
from fairfleet.client.operator.fleet_view import Disconnected, FleetView, Observation, fold
from fairfleet.common.cli.message_json import plain
from fairfleet.proto.v1 import operator_pb2 as pb
from tests.support.samples.events import (
    NAMES,
    began,
    committed,
    delivered,
    evaluated,
    event,
    finished,
    joined,
    start,
)


def lines_of(*observations: Observation) -> list[str]:
    """Return all lines for a series of observations."""
    view, all_lines = FleetView(), []
    for observation in observations:
        before, view = view, fold(view, observation)
        all_lines += lines(before, observation, view)
    return all_lines


def test_notable_events_have_one_line_and_routine_ones_none() -> None:
    shown = lines_of(
        start(),
        *joined("a"),
        began(0, "a", "b"),
        delivered(0, "a", 2.3, 1, 1),
        event(0, aggregation_started=pb.AggregationStarted(updates=2)),
        committed(0),
        *evaluated(1, a=0.9, b=0.4),
        finished(1),
        start(),
    )
    assert shown == [
        "fleet: fedavg, 650 parameters, round 1 of 10; waiting for 3 more clients",
        "a joined with 50 samples; 1 connected",
        "round 1 of 10: 2 updates, mean loss 0.500, training 0.25 s, aggregation 1 ms, "
        "commit 10 ms, 5.2 kB received",
        "evaluation after round 1: mean accuracy 65.0 %, worst b 40.0 %",
        "finished after 1 round: all rounds are done",
    ]


def test_failures_have_a_line() -> None:
    shown = lines_of(
        start(),
        *joined(*NAMES),
        event(0, client_gone=pb.ClientGone(client="b", reason="silent for 30 s", connected=2)),
        event(0, round_started=pb.RoundStarted(clients=["b"], attempt=1, received=2)),
        committed(0, "c"),
        event(
            1, evaluation_reported=pb.EvaluationReported(client="a", failure="ValueError: no data")
        ),
    )[4:]
    assert shown[0] == "b is gone (silent for 30 s); 2 connected"
    assert shown[1] == "round 1 of 10: attempt 2 selects 1 more client, keeps 2 updates"
    assert shown[2].endswith("; without c")
    assert shown[3] == "a could not evaluate: ValueError: no data"


def test_a_lost_connection_is_reported_once() -> None:
    assert lines_of(start(), Disconnected("the server stopped"), Disconnected("no answer"))[1:] == [
        "the server stopped; trying again"
    ]


def test_json_events_are_flat_with_numbers_as_numbers_and_enums_as_words() -> None:
    line = json.loads(json.dumps(as_json(committed(7, "c"))))
    assert (line["kind"], line["round"], line["record"]["bytes_received"]) == (
        "round_committed",
        7,
        5200,
    )
    assert line["record"]["dropped"] == ["c"]
    status = as_json(start())
    assert (status["kind"], status["phase"], status["missing"], status["clients"]) == (
        "status",
        "waiting",
        3,
        [],
    )


def test_json_has_null_for_nan_and_omits_fields_that_are_not_set() -> None:
    assert plain(pb.TrainingProgress(client="a", loss=math.nan))["loss"] is None
    assert "evaluation" not in plain(pb.ClientRecord(client="a"))
    assert plain(pb.RoundRecord(digest=b"\x01\xff"))["digest"] == "01ff"
