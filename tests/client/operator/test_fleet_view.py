"""Folding observations into a view of the federation."""

from __future__ import annotations

from fairfleet.client.operator.fleet_view import (
    ClientActivity,
    Disconnected,
    FleetView,
    Snapshot,
    fold,
)
from fairfleet.client.operator.formatting import phase, round_of
from fairfleet.proto.v1 import fleet_pb2
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
    view_after,
)


def test_the_waiting_phase_names_the_number_of_missing_clients() -> None:
    assert phase(view_after(start())) == "waiting for 3 more clients"
    assert phase(view_after(start(), *joined("a", "b"))) == "waiting for 1 more client"


def test_a_round_shows_which_clients_train_and_which_have_delivered() -> None:
    view = view_after(
        start(), *joined(*NAMES), began(0, *NAMES), delivered(0, "b", 2.3, received=1, asked=2)
    )
    assert {name: client.doing for name, client in view.clients.items()} == {
        "a": ClientActivity.TRAINING,
        "b": ClientActivity.DELIVERED,
        "c": ClientActivity.TRAINING,
    }
    assert phase(view) == "training: received 1 of 3 updates"
    assert round_of(view) == "round 1 of 10"


def test_the_verification_phase_counts_the_clients_that_have_not_answered() -> None:
    verification = event(
        0, verification_started=pb.VerificationStarted(clients=["a", "b"], halvings=2)
    )
    view = view_after(start(), *joined(*NAMES), began(0, "a", "b"), verification)
    assert phase(view) == "trying the step: waiting for 2 clients"
    view = fold(view, event(0, step_tried=pb.StepTried(client="a", losses=[0.5, 0.6, 0.7])))
    assert phase(view) == "trying the step: waiting for 1 client"
    assert (view.clients["a"].doing, view.clients["b"].doing) == (
        ClientActivity.DELIVERED,
        ClientActivity.VERIFYING,
    )
    view = fold(view, event(0, step_tried=pb.StepTried(client="b", failure="out of memory")))
    assert view.clients["b"].doing is ClientActivity.FAILED


def test_a_client_that_leaves_while_training_is_lost_and_an_idle_one_is_gone() -> None:
    view = view_after(start(), *joined(*NAMES), began(0, "a", "b"))
    for name in ("a", "c"):
        view = fold(
            view, event(0, client_gone=pb.ClientGone(client=name, reason="silent", connected=2))
        )
    assert view.clients["a"].doing is ClientActivity.LOST
    assert view.clients["c"].doing is ClientActivity.GONE


def test_a_client_that_retires_is_not_gone() -> None:
    view = view_after(start(), *joined(*NAMES), began(0, "a", "b"))
    gone = pb.ClientGone(client="a", reason="spent", connected=2, retired=True)
    assert fold(view, event(0, client_gone=gone)).clients["a"].doing is ClientActivity.RETIRED


def test_a_commit_counts_the_round_and_marks_dropped_clients_as_lost() -> None:
    view = view_after(start(), *joined(*NAMES), began(0, *NAMES), committed(0, "c"))
    assert view.status.version == 1
    assert view.clients["c"].doing is ClientActivity.LOST
    assert view.recent[-1].training_seconds == 0.25


def test_before_any_evaluation_the_highest_loss_comes_first() -> None:
    losses = [
        delivered(0, name, loss, 1, 2) for name, loss in zip(NAMES, (0.5, 2.0, 1.0), strict=True)
    ]
    view = view_after(start(), *joined(*NAMES), began(0, *NAMES), *losses)
    assert [client.name for client in view.by_need()] == ["b", "c", "a"]


def test_after_an_evaluation_the_lowest_accuracy_comes_first() -> None:
    view = view_after(start(), *joined(*NAMES), *evaluated(1, a=0.9, b=0.8, c=0.3))
    assert [client.name for client in view.by_need()] == ["c", "b", "a"]
    (evaluation,) = view.evaluations
    assert (evaluation.version, evaluation.worst, evaluation.worst_client) == (1, 0.3, "c")
    assert abs(evaluation.mean - 2 / 3) < 1e-9


def test_a_client_that_cannot_evaluate_keeps_its_last_accuracy() -> None:
    view = view_after(start(), *joined("a"), *evaluated(1, a=0.9))
    failed = pb.EvaluationReported(client="a", failure="no test data")
    view = fold(view, event(2, evaluation_reported=failed))
    assert (view.clients["a"].doing, view.clients["a"].accuracy) == (ClientActivity.FAILED, 0.9)


def test_the_remaining_time_follows_the_pace_of_the_rounds() -> None:
    view = view_after(
        start(rounds=10), *(committed(round_number) for round_number in range(4))
    )  # one second each
    assert view.seconds_left(now=1003.0) == 6.0
    assert view.seconds_left(now=1003.5) == 5.5
    assert view.seconds_left(now=9e9) == 5.0  # a wrong clock costs at most one round
    assert view_after(start(), committed(0)).seconds_left(now=1000.0) is None


def test_folding_does_not_change_the_given_view() -> None:
    before = view_after(start(), *joined(*NAMES))
    fold(before, began(0, *NAMES))
    assert before.clients["a"].doing is ClientActivity.IDLE
    assert before.status.phase == pb.PHASE_WAITING


def test_a_snapshot_gives_a_late_watcher_the_full_view() -> None:
    evaluation = fleet_pb2.Evaluation(samples=20, loss=0.7, accuracy=0.8)
    client = pb.ClientRecord(
        client="a", state=pb.CLIENT_STATE_TRAINING, updates_counted=4, evaluation=evaluation
    )
    client.evaluated_version = 4
    records = tuple(committed(round_number).round_committed.record for round_number in range(4))
    status = pb.StatusResponse(
        version=4, rounds_planned=10, phase=pb.PHASE_TRAINING, received=1, asked=1
    )
    view = view_after(Snapshot(status, (client,), records))
    assert view.clients["a"].doing is ClientActivity.TRAINING
    assert (
        view.clients["a"].accuracy,
        view.clients["a"].updates,
        view.clients["a"].train_loss,
    ) == (0.8, 4, 0.5)
    assert view.evaluations[-1].version == 4
    assert view.seconds_left(now=1003.0) == 6.0


def test_a_snapshot_after_a_lost_connection_clears_the_trouble() -> None:
    view = view_after(start(), Disconnected("connection refused"))
    assert phase(view) == "the server does not answer; trying again"
    assert fold(view, start()).trouble == ""


def test_the_phase_names_a_pause_and_the_end() -> None:
    view = view_after(start(), *joined(*NAMES), event(0, federation_paused=pb.FederationPaused()))
    assert phase(view).startswith("paused")
    view = fold(view, event(0, federation_resumed=pb.FederationResumed()))
    assert phase(view) == "about to start a round"
    view = fold(view, finished(10))
    assert phase(view) == "finished: all rounds are done"


def test_an_unknown_event_of_a_newer_server_is_ignored() -> None:
    view = FleetView()
    assert fold(view, pb.Event(round=3)) is view


def test_a_client_that_knows_of_the_end_is_finished_and_not_gone() -> None:
    state = pb.CLIENT_STATE_FINISHED
    status = pb.StatusResponse(phase=pb.PHASE_FINISHED)
    snapshot = Snapshot(status, [pb.ClientRecord(client="ann", state=state)])
    assert fold(FleetView(), snapshot).clients["ann"].doing.value == "finished"
