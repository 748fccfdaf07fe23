from __future__ import annotations

from fairfleet.client.fleet_view import Disconnected, Doing, Snapshot, View, fold
from fairfleet.client.words import phase, round_of
from fairfleet.proto.v1 import fleet_pb2
from fairfleet.proto.v1 import operator_pb2 as pb
from tests.cli.events import (
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


def test_while_waiting_it_says_how_many_clients_are_missing() -> None:
    assert phase(view_after(start())) == "waiting for 3 more clients"
    assert phase(view_after(start(), *joined("a", "b"))) == "waiting for 1 more client"


def test_a_round_shows_who_trains_and_who_has_delivered() -> None:
    view = view_after(start(), *joined(*NAMES), began(0, *NAMES), delivered(0, "b", 2.3, received=1, asked=2))
    assert {name: client.doing for name, client in view.clients.items()} == {
        "a": Doing.TRAINING,
        "b": Doing.DELIVERED,
        "c": Doing.TRAINING,
    }
    assert phase(view) == "training: 1 of 3 updates are in"
    assert round_of(view) == "round 1 of 10"


def test_while_a_step_is_tried_it_shows_who_has_yet_to_answer() -> None:
    begun = event(0, verification_started=pb.VerificationStarted(clients=["a", "b"], halvings=2))
    view = view_after(start(), *joined(*NAMES), began(0, "a", "b"), begun)
    assert phase(view) == "trying the step: 2 clients still to answer"
    view = fold(view, event(0, step_tried=pb.StepTried(client="a", losses=[0.5, 0.6, 0.7])))
    assert phase(view) == "trying the step: 1 client still to answer"
    assert (view.clients["a"].doing, view.clients["b"].doing) == (Doing.DELIVERED, Doing.VERIFYING)
    view = fold(view, event(0, step_tried=pb.StepTried(client="b", failure="out of memory")))
    assert view.clients["b"].doing is Doing.FAILED


def test_a_client_that_goes_in_mid_training_is_lost_and_an_idle_one_is_gone() -> None:
    view = view_after(start(), *joined(*NAMES), began(0, "a", "b"))
    for name in ("a", "c"):
        view = fold(view, event(0, client_gone=pb.ClientGone(client=name, reason="silent", connected=2)))
    assert view.clients["a"].doing is Doing.LOST
    assert view.clients["c"].doing is Doing.GONE


def test_a_commit_counts_the_round_and_names_the_lost() -> None:
    view = view_after(start(), *joined(*NAMES), began(0, *NAMES), committed(0, "c"))
    assert view.status.version == 1
    assert view.clients["c"].doing is Doing.LOST
    assert view.recent[-1].training_seconds == 0.25


def test_before_any_evaluation_the_highest_loss_comes_first() -> None:
    losses = [delivered(0, name, loss, 1, 2) for name, loss in zip(NAMES, (0.5, 2.0, 1.0), strict=True)]
    view = view_after(start(), *joined(*NAMES), began(0, *NAMES), *losses)
    assert [client.name for client in view.by_need()] == ["b", "c", "a"]


def test_after_an_evaluation_the_lowest_accuracy_comes_first() -> None:
    view = view_after(start(), *joined(*NAMES), *evaluated(1, a=0.9, b=0.8, c=0.3))
    assert [client.name for client in view.by_need()] == ["c", "b", "a"]
    (served,) = view.evaluations
    assert (served.version, served.worst, served.worst_client) == (1, 0.3, "c")
    assert abs(served.mean - 2 / 3) < 1e-9


def test_a_client_that_cannot_evaluate_keeps_what_was_known_of_it() -> None:
    view = view_after(start(), *joined("a"), *evaluated(1, a=0.9))
    failed = pb.EvaluationReported(client="a", failure="no test data")
    view = fold(view, event(2, evaluation_reported=failed))
    assert (view.clients["a"].doing, view.clients["a"].accuracy) == (Doing.FAILED, 0.9)


def test_time_left_follows_the_pace_of_the_rounds() -> None:
    view = view_after(start(rounds=10), *(committed(round) for round in range(4)))  # one second each
    assert view.seconds_left(now=1003.0) == 6.0
    assert view.seconds_left(now=1003.5) == 5.5
    assert view.seconds_left(now=9e9) == 5.0  # another clock does no more harm than a round's worth
    assert view_after(start(), committed(0)).seconds_left(now=1000.0) is None


def test_folding_changes_no_view_that_someone_holds() -> None:
    before = view_after(start(), *joined(*NAMES))
    fold(before, began(0, *NAMES))
    assert before.clients["a"].doing is Doing.IDLE
    assert before.status.phase == pb.PHASE_WAITING


def test_a_snapshot_tells_a_latecomer_everything() -> None:
    evaluation = fleet_pb2.Evaluation(samples=20, loss=0.7, accuracy=0.8)
    client = pb.ClientRecord(client="a", state=pb.CLIENT_STATE_TRAINING, updates_counted=4, evaluation=evaluation)
    client.evaluated_version = 4
    records = tuple(committed(round).round_committed.record for round in range(4))
    status = pb.StatusResponse(version=4, rounds_planned=10, phase=pb.PHASE_TRAINING, received=1, asked=1)
    view = view_after(Snapshot(status, (client,), records))
    assert view.clients["a"].doing is Doing.TRAINING
    assert (view.clients["a"].accuracy, view.clients["a"].updates, view.clients["a"].train_loss) == (0.8, 4, 0.5)
    assert view.evaluations[-1].version == 4
    assert view.seconds_left(now=1003.0) == 6.0


def test_a_server_that_comes_back_ends_the_trouble() -> None:
    view = view_after(start(), Disconnected("connection refused"))
    assert phase(view) == "the server does not answer; trying again"
    assert fold(view, start()).trouble == ""


def test_pausing_and_the_end_are_told_in_words() -> None:
    view = view_after(start(), *joined(*NAMES), event(0, federation_paused=pb.FederationPaused()))
    assert phase(view).startswith("paused")
    view = fold(view, event(0, federation_resumed=pb.FederationResumed()))
    assert phase(view) == "about to begin"
    view = fold(view, finished(10))
    assert phase(view) == "finished: all rounds are done"


def test_an_event_of_a_newer_server_is_passed_over() -> None:
    view = View()
    assert fold(view, pb.Event(round=3)) is view
