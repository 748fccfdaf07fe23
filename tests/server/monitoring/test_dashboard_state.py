"""The state that the page gets: changes since any revision add up to the current state."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairfleet.common.reports import MAX_MEASURES, Evaluation, higher
from fairfleet.proto.v1 import operator_pb2 as pb
from fairfleet.server.federation.event_stream import step_improvement
from fairfleet.server.monitoring.dashboard_state import DashboardState
from fairfleet.server.monitoring.measures import (
    Comparison,
    Conflicts,
    FleetEvaluation,
    StepTaken,
)
from fairfleet.server.monitoring.prometheus_families import (
    client_families,
    improvement_families,
    step_families,
)
from fairfleet.server.rounds.missing_evaluations import NO_TEST_DATA, SILENT
from fairfleet.server.storage.round_record import StepImprovement

CLIENTS = ("ann", "bob", "cyd")


def event(round_number: int = 0, **kind: Any) -> pb.Event:
    return pb.Event(sequence=1, unix_seconds=5.0, round=round_number, **kind)


def step(*conflicts: str) -> StepTaken:
    coefficients = {client: 1 / len(CLIENTS) for client in CLIENTS}
    return StepTaken.of(
        {
            "coefficients": coefficients,
            "conflicts": list(conflicts),
            "layer_conflicts": [list(conflicts), []],
            "direction_norm": 1.0,
            "history_coefficients": {},
            "status": "ok",
            "cosines": {client: -0.5 if client in conflicts else 0.5 for client in CLIENTS},
        }
    )


def record(round_number: int, *, dropped: tuple[str, ...] = ()) -> pb.RoundRecord:
    contributions = [
        pb.ClientContribution(client=client) for client in CLIENTS if client not in dropped
    ]
    return pb.RoundRecord(round=round_number, contributions=contributions, dropped=dropped)


def served(version: int, **accuracies: float | None) -> FleetEvaluation:
    now = {
        client: Evaluation(samples=1, loss=1.0, accuracy=a)
        for client, a in accuracies.items()
        if a is not None
    }
    failures = {client: SILENT for client, accuracy in accuracies.items() if accuracy is None}
    return FleetEvaluation.of(version, now, {}, failures)


def merged(whole: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Merge changes into a state like the page."""
    if changes["whole"]:
        return changes
    clients = {row["client"]: row for row in whole["clients"]} | {
        row["client"]: dict(row) for row in changes["clients"]
    }
    rounds = {entry["round"]: entry for entry in whole["rounds"]} | {
        e["round"]: dict(e) for e in changes["rounds"]
    }
    lists = {
        name: whole[name] + changes[name]
        for name in ("evaluations", "server_evaluations", "events")
    }
    return {
        "revision": changes["revision"],
        "whole": True,
        "clients": list(clients.values()),
        "rounds": [*rounds.values()],
        **lists,
    }


def measured(round_number: int, improved: float) -> pb.StepMeasured:
    return pb.StepMeasured(
        round=max(0, round_number), measured=pb.Measured(improved=improved, clients=3)
    )


HAPPENINGS = st.sampled_from(
    [
        lambda picture, k: picture.observe(
            event(k, client_joined=pb.ClientJoined(client=CLIENTS[k % 3]))
        ),
        lambda picture, k: picture.observe(
            event(k, client_gone=pb.ClientGone(client=CLIENTS[k % 3], reason="left"))
        ),
        lambda picture, k: picture.observe(
            event(k, round_started=pb.RoundStarted(clients=CLIENTS))
        ),
        lambda picture, k: picture.committed(record(k), step(CLIENTS[k % 3])),
        lambda picture, k: picture.observe(event(k, step_measured=measured(k - 2, 0.1 * (k % 9)))),
        lambda picture, k: picture.observe(
            event(k, verification_started=pb.VerificationStarted(clients=CLIENTS))
        ),
        lambda picture, k: picture.compare(
            {CLIENTS[k % 3]},
            {CLIENTS[k % 2]} if k > 20 else set(),
            {CLIENTS[2]: "spent"} if k > 15 else {},
            finished=k > 25,
        ),
        lambda picture, k: picture.evaluated(served(k, ann=0.1 * (k % 9), bob=None), 7.0),
        lambda picture, k: picture.forget_history() if k % 5 == 0 else None,
    ]
)


@given(happenings=st.lists(HAPPENINGS, max_size=30), seen=st.integers(0, 29))
def test_an_earlier_state_and_the_changes_since_add_up_to_the_current_state(
    happenings: list[Any], seen: int
) -> None:
    picture = DashboardState()
    then = json.loads(json.dumps(picture.since(0)))
    for k, happen in enumerate(happenings):
        happen(picture, k)
        if k == seen:
            then = json.loads(json.dumps(picture.since(0)))
    now = merged(then, picture.since(then["revision"]))
    order = sorted(now["clients"], key=lambda row: row["client"])
    expected = picture.since(0)
    assert order == sorted(expected["clients"], key=lambda row: row["client"])
    assert {**now, "clients": []} == {**expected, "clients": []}


def row(picture: DashboardState, client: str) -> dict[str, Any]:
    return next(entry for entry in picture.since(0)["clients"] if entry["client"] == client)


def test_a_client_selected_again_after_a_restart_counts_once() -> None:
    picture = DashboardState()
    picture.set("ann", asked=3, asked_round=7)
    picture.observe(event(7, round_started=pb.RoundStarted(clients=["ann"])))
    assert row(picture, "ann")["asked"] == 3
    picture.observe(event(8, round_started=pb.RoundStarted(clients=["ann"])))
    assert row(picture, "ann")["asked"] == 4


def test_a_client_without_an_evaluation_keeps_its_last_one_with_a_reason() -> None:
    picture = DashboardState()
    picture.evaluated(served(2, ann=0.5, bob=0.9), 1.0)
    picture.evaluated(served(4, ann=None, bob=0.8), 2.0)
    assert (row(picture, "ann")["accuracy"], row(picture, "ann")["evaluated"]) == (0.5, 2)
    assert row(picture, "ann")["failure"] == SILENT
    assert row(picture, "bob")["failure"] == ""


def test_a_selected_client_that_was_dropped_is_shown_as_lost() -> None:
    picture = DashboardState()
    picture.observe(event(0, round_started=pb.RoundStarted(clients=CLIENTS)))
    picture.committed(record(0, dropped=("cyd",)), step())
    assert [row(picture, client)["state"] for client in CLIENTS] == ["idle", "idle", "lost"]


def test_a_round_that_is_reported_twice_counts_once() -> None:
    picture = DashboardState()
    for _ in range(2):
        picture.committed(record(3), step("bob"))
    assert len(picture.since(0)["rounds"]) == 1
    assert (row(picture, "bob")["conflicts"], row(picture, "bob")["streak"]) == (1, 1)


def test_a_streak_is_of_a_clients_own_rounds_and_ends_with_one_that_does_not_harm_it() -> None:
    conflicts = Conflicts(remembered=3)
    conflicts.add(0, ["ann", "bob"], frozenset({"ann"}))
    conflicts.add(1, ["bob"], frozenset({"bob"}))  # ann is not selected, so her streak continues.
    conflicts.add(2, ["ann", "bob"], frozenset({"ann"}))
    assert (
        conflicts.streaks["ann"],
        conflicts.streaks["bob"],
        conflicts.longest_streak(CLIENTS),
    ) == (2, 0, 2)
    assert conflicts.longest_streak(["bob"]) == 0, "who is not there wakes nobody"
    conflicts.add(3, ["ann"], frozenset())
    assert conflicts.longest_streak(CLIENTS) == 0
    assert conflicts.counts["ann"] == 1, "round 0 is no longer remembered"


def test_outcomes_of_an_evaluation_distinguish_the_reasons() -> None:
    now = {"ann": Evaluation(samples=1, loss=1.0)}
    failures = {"bob": SILENT, "cyd": NO_TEST_DATA, "dan": "ValueError: no"}
    assert FleetEvaluation.of(1, now, {}, failures).outcomes() == {
        "reported": 1,
        "failed": 1,
        "silent": 1,
        "no_test_data": 1,
    }


def joined(client: str) -> pb.Event:
    return event(client_joined=pb.ClientJoined(client=client))


def gone(client: str, reason: str = "left") -> pb.Event:
    return event(client_gone=pb.ClientGone(client=client, reason=reason))


@pytest.mark.parametrize(
    "late",
    [
        {"round_started": pb.RoundStarted(clients=["ann"])},
        {"verification_started": pb.VerificationStarted(clients=["ann"])},
        {"evaluation_started": pb.EvaluationStarted(clients=["ann"])},
        {"evaluation_reported": pb.EvaluationReported(client="ann")},
        {"update_received": pb.UpdateReceived(client="ann")},
        {"step_tried": pb.StepTried(client="ann")},
    ],
)
@pytest.mark.parametrize(("reason", "state"), [("left", "gone"), ("revoked", "revoked")])
def test_a_client_that_left_or_was_revoked_stays_so_until_it_joins(
    late: dict[str, Any], reason: str, state: str
) -> None:
    picture = DashboardState()
    for happens in (
        joined("ann"),
        gone("ann", reason),
        event(**late),
        event(evaluation_finished={}),
    ):
        picture.observe(happens)
    assert row(picture, "ann")["state"] == state
    picture.observe(joined("ann"))
    assert row(picture, "ann")["state"] != state


def test_after_a_restart_a_selected_client_is_shown_as_training_only_once_it_is_back() -> None:
    picture = DashboardState()
    picture.set("ann", state="gone")
    picture.observe(event(round_started=pb.RoundStarted(clients=["ann"])))
    picture.compare(set(), set(), {}, finished=False)
    assert (row(picture, "ann")["state"], row(picture, "ann")["connected"]) == ("gone", False)
    picture.observe(joined("ann"))
    picture.compare({"ann"}, set(), {}, finished=False)
    assert (row(picture, "ann")["state"], row(picture, "ann")["connected"]) == ("training", True)


def test_a_client_that_tries_a_step_is_shown_as_verifying_and_the_round_has_the_outcome() -> None:
    picture = DashboardState()
    for client in CLIENTS:
        picture.observe(joined(client))
    picture.observe(event(verification_started=pb.VerificationStarted(clients=CLIENTS)))
    assert row(picture, "ann")["state"] == "verifying"
    picture.observe(event(step_tried=pb.StepTried(client="ann")))
    assert row(picture, "ann")["state"] == "delivered"
    fields = record(0)
    fields.promised = 1.0
    fields.verification.CopyFrom(pb.Verification(factor=0.5, seconds=2.0))
    picture.committed(fields, step())
    assert {row(picture, client)["state"] for client in CLIENTS} == {"idle"}
    seen = picture.revision
    picture.observe(event(1, step_measured=measured(0, 0.75)))
    (entry,) = picture.since(seen)["rounds"]
    assert (
        entry["promised"],
        entry["measured"],
        entry["factor"],
        entry["verification_seconds"],
    ) == (1, 0.75, 0.5, 2)


def test_a_retired_client_is_not_gone_and_takes_part_again_when_it_joins() -> None:
    picture = DashboardState()
    picture.observe(joined("ann"))
    gone = pb.ClientGone(client="ann", reason="its budget is spent", retired=True)
    picture.observe(event(client_gone=gone))
    shown = row(picture, "ann")
    assert (shown["state"], shown["not_selected_because"]) == ("retired", "its budget is spent")
    picture.observe(joined("ann"))
    assert row(picture, "ann")["state"] == "idle"


def test_a_client_that_retired_in_an_earlier_run_of_the_server_is_shown_so() -> None:
    picture = DashboardState()
    picture.set("ann", state="gone")
    picture.compare(set(), set(), {"ann": "its budget is spent"}, finished=True)
    shown = row(picture, "ann")
    assert (shown["state"], shown["not_selected_because"]) == ("retired", "its budget is spent")


def test_a_revoked_client_has_no_streak() -> None:
    picture = DashboardState()
    picture.observe(joined("bob"))
    picture.committed(record(0), step("bob"))
    picture.compare({"bob"}, {"bob"}, {}, finished=False)
    assert (row(picture, "bob")["state"], row(picture, "bob")["streak"]) == ("revoked", 0)
    assert picture.conflicts.longest_streak(CLIENTS) == 0


def step_at(level: str) -> StepTaken:
    fields = {
        "rule": "fedavg",
        "status": "ok",
        "level": level,
        "coefficients": dict.fromkeys(CLIENTS, 0.25),
    }
    fields |= {"history_coefficients": {}, "direction_norm": 1.0, "cosines": {}}
    if level == "model":
        fields |= {"conflicts": ["bob"], "cosines": dict.fromkeys(CLIENTS, 0.5)}
    return StepTaken.of(fields)


def test_figures_that_were_not_computed_are_shown_as_unknown_not_as_zero() -> None:
    picture = DashboardState()
    picture.committed(record(0), step_at("off"))
    entry = picture.since(0)["rounds"][0]
    assert (entry["diagnostics"], entry["conflicts"], entry["conflicting_layers"]) == (
        "off",
        None,
        None,
    )
    assert (row(picture, "bob")["conflicts"], row(picture, "bob")["streak"]) == (None, None)
    picture.committed(record(1), step_at("model"))
    entry = picture.since(0)["rounds"][1]
    assert (entry["diagnostics"], entry["conflicts"], entry["conflicting_layers"]) == (
        "model",
        1,
        None,
    )
    assert (row(picture, "bob")["conflicts"], row(picture, "bob")["streak"]) == (1, 1)
    picture.committed(record(2), step_at("off"))
    assert row(picture, "bob")["streak"] == 1, (
        "a round that says nothing neither ends nor prolongs a streak"
    )


def test_series_that_were_not_computed_are_absent_and_the_level_is_reported() -> None:
    def families(level: str) -> set[str]:
        return {family.name for family in step_families(step_at(level), ["weight", "bias"])}

    assert "fairfleet_diagnostics_level" in families("off")
    assert not {"fairfleet_conflicting_clients", "fairfleet_conflicting_layers"} & families("off")
    assert "fairfleet_conflicting_clients" in families("model")
    assert not {"fairfleet_conflicting_layers", "fairfleet_layer_conflicting_clients"} & families(
        "model"
    )
    names = {family.name for family in client_families(None, step_at("off"), None, list(CLIENTS))}
    assert "fairfleet_client_conflict_streak_rounds" not in names


def test_a_record_that_lacks_what_its_level_has_cannot_be_measured() -> None:
    with pytest.raises(KeyError):
        StepTaken.of({"level": "full", "coefficients": {}, "cosines": {}})


@pytest.mark.parametrize(
    ("recorded", "shown"),
    [
        (StepImprovement(1.0, 3, 0.5), {"improved": 1.0, "strictly_improved": 0.5}),
        (StepImprovement(0.5, 3), {"strictly_improved": 0.5}),
    ],
)
def test_the_record_of_an_older_server_has_only_the_share_of_losses_that_fell(
    recorded: StepImprovement, shown: dict[str, float]
) -> None:
    message = pb.Measured(**asdict(recorded))
    assert step_improvement(message) == recorded
    families = improvement_families(step_improvement(message))
    assert {family.name: family.samples[0].value for family in families} == {
        f"fairfleet_step_{name}_clients_ratio": value for name, value in shown.items()
    }


def test_an_evaluation_counts_clients_whose_loss_stays_the_same_as_improved() -> None:
    def losses(**by_client: float) -> dict[str, Evaluation]:
        return {name: Evaluation(samples=1, loss=loss) for name, loss in by_client.items()}

    now, before = losses(ann=1.0, bob=2.0, cyd=3.0, dan=1.0), losses(ann=1.0, bob=3.0, cyd=2.0)
    evaluation = FleetEvaluation.of(1, now, before, {})
    assert evaluation.improved == pytest.approx(2 / 3)
    assert evaluation.strictly_improved == pytest.approx(1 / 3)


def test_the_chosen_measure_is_shown_whatever_else_a_client_reports() -> None:
    invented = {f"a{number}": higher(0.5) for number in range(MAX_MEASURES)}
    now = {
        "eve": Evaluation(samples=1, measures=invented),
        "ann": Evaluation(samples=1, measures={"score": higher(0.1)}),
    }
    shown = FleetEvaluation.of(1, now, {}, {}, Comparison("score", lambda name: "lower"))
    assert len(shown.own) == MAX_MEASURES
    assert shown.directions["score"] == "lower"
