"""The scheduler: deadlines of rounds, numbers of clients, and the end of the federation."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairfleet.common.reports import Evaluation
from fairfleet.common.tensors import Model
from fairfleet.server.federation.clients.sessions import ClientDescription, Session
from fairfleet.server.federation.scheduler import Scheduler
from fairfleet.server.rounds.deadlines import CHANCES, TrainingDuration, adaptive
from fairfleet.server.rounds.state_machine import Phase, Policy, Round
from fairfleet.server.rounds.stopping import StopConditions, reason_to_end
from fairfleet.server.settings import ServerSettings
from fairfleet.server.storage.evaluation_queries import evaluation_write
from fairfleet.server.storage.store import Store


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = Store(tmp_path)
    store.create("test", Model.of({"w": np.zeros(2, np.float32)}), bytes(32))
    yield store
    store.close()


def sessions(count: int) -> list[Session]:
    members = [ClientDescription(f"c{k}", "", "", 10, 10, ("raw32",)) for k in range(count)]
    return [Session(member.client, 1, member, 0.0) for member in members]


def scheduler(store: Store, **round_number: object) -> Scheduler:
    return Scheduler(ServerSettings.model_validate({"round": round_number}), store)


def test_more_clients_are_selected_than_needed_and_the_first_updates_count(store: Store) -> None:
    chosen = scheduler(store, clients=10, over_selection=1.3).choose(Round(0), sessions(50))
    assert chosen is not None
    assert (len(chosen.clients), chosen.wanted) == (13, 10)
    few = scheduler(store, clients=10, over_selection=1.3).choose(Round(0), sessions(8))
    assert few is not None
    assert (len(few.clients), few.wanted) == (8, 8)


def test_no_client_is_selected_while_the_fleet_is_too_small_paused_or_finished(
    store: Store,
) -> None:
    picky = scheduler(store, clients=2, minimum_clients=3)
    assert picky.choose(Round(0), sessions(2)) is None
    assert "waiting for 1 more clients: 2 of at least 3" in picky.too_few(sessions(2))
    assert picky.choose(Round(0, paused=True), sessions(5)) is None
    assert picky.choose(Round(0, received=frozenset({"c0", "c1"})), sessions(5)) is None


def test_connected_clients_evaluate_even_if_too_few_for_a_round(store: Store) -> None:
    picky, over = (
        scheduler(store, minimum_clients=3),
        Round(3, Phase.EVALUATING, stopping="all rounds are done"),
    )
    chosen = picky.choose(over, sessions(2))
    assert chosen is not None
    assert chosen.clients == {"c0", "c1"}
    assert picky.choose(over, []) is None, "somebody may still come"


def test_other_clients_replace_silent_ones(store: Store) -> None:
    silent = Round(0, attempt=1, wanted=2, asked=frozenset({"c0", "c1"}))
    chosen = scheduler(store, clients=2).choose(silent, sessions(4))
    assert chosen is not None
    assert (chosen.clients, chosen.wanted) == ({"c2", "c3"}, 2)


def test_selection_and_quorum_are_separate_settings() -> None:
    assert Policy(rounds=1, quorum=0.5).suffice(10) == 5
    assert Policy(rounds=1, quorum=0.5, tolerate_missing=2).suffice(10) == 8
    assert Policy(rounds=1, tolerate_missing=99).suffice(10) == 1


PACES = st.builds(TrainingDuration, st.floats(0, 1e4), st.integers(0, 9))


@given(st.lists(st.floats(0, 1e4), max_size=40), st.lists(PACES, max_size=5), st.floats(1, 10))
def test_an_adaptive_deadline_stays_within_its_limits(
    durations: list[float], asked: list[TrainingDuration], factor: float
) -> None:
    assert 5.0 <= adaptive(durations, asked, longest=600.0, shortest=5.0, factor=factor) <= 600.0


def test_an_adaptive_deadline_is_learned_and_a_fixed_one_is_not(store: Store) -> None:
    learning = scheduler(store, deadline="adaptive", shortest_deadline_seconds=1, deadline_factor=2)
    fixed = scheduler(store)
    for policy in (learning, fixed):
        assert policy.patience(Phase.TRAINING, {"a"}) == 600.0
        for number in range(20):
            policy.record_duration("a", number, 4.0)
    assert learning.patience(Phase.TRAINING, {"a"}) == pytest.approx(8.0)
    assert fixed.patience(Phase.TRAINING, {"a"}) == 600.0


def learned(store: Store) -> Scheduler:
    """Return a scheduler that has seen nine clients train in 1 s, so the deadline is 2 s."""
    learning = scheduler(store, deadline="adaptive", shortest_deadline_seconds=1, deadline_factor=2)
    for number in range(20):
        for k in range(9):
            learning.record_duration(f"quick-{k}", number, 1.0)
    return learning


def test_a_late_client_gets_a_longer_deadline_each_time_until_it_answers(store: Store) -> None:
    learning, needs = learned(store), 11.0
    given = []
    for number in range(20, 30):
        given.append(learning.patience(Phase.TRAINING, {"slow", "quick-0"}))
        if given[-1] >= needs:
            learning.record_duration("slow", number, needs)
            break
        learning.cut_off("slow", number, asked_at=0.0, now=given[-1])
    assert given == pytest.approx([2.0, 4.0, 8.0, 16.0])
    assert learning.patience(Phase.TRAINING, {"quick-0"}) == pytest.approx(
        2.0
    )  # Rounds without the slow client do not wait longer.


def test_slow_clients_count_in_the_fleet_while_they_are_late(store: Store) -> None:
    learning = learned(store)
    for number in range(20, 20 + CHANCES):
        for k in range(9):
            learning.cut_off(f"slow-{k}", number, asked_at=0.0, now=5.0)
    assert learning.patience(Phase.TRAINING, {"quick-0"}) == pytest.approx(10.0)


def test_a_late_update_reports_its_training_time(store: Store) -> None:
    learning = learned(store)
    learning.cut_off("slow", 20, asked_at=100.0, now=102.0)
    learning.record_late_announcement("slow", 20, now=130.0)
    assert learning.patience(Phase.TRAINING, {"slow"}) == pytest.approx(60.0)
    learning.record_late_announcement(
        "slow", 20, now=900.0
    )  # A repeated announcement changes nothing.
    assert learning.patience(Phase.TRAINING, {"slow"}) == pytest.approx(60.0)
    learning.record_late_announcement("quick-0", 20, now=900.0)  # This client was never late.
    assert learning.patience(Phase.TRAINING, {"quick-0"}) == pytest.approx(2.0)


def test_a_hanging_client_does_not_delay_the_fleet_forever(store: Store) -> None:
    learning = learned(store)
    for number in range(20, 20 + CHANCES + 1):
        learning.cut_off("hangs", number, 0.0, learning.patience(Phase.TRAINING, {"hangs"}))
    assert learning.patience(Phase.TRAINING, {"hangs"}) == pytest.approx(2.0)


def test_the_deadline_returns_to_normal_if_a_quarter_of_the_fleet_hangs(
    store: Store,
) -> None:
    fleet = [f"c{k}" for k in range(8)]
    learning = scheduler(store, deadline="adaptive", shortest_deadline_seconds=1)
    given = []
    for number in range(60):
        given.append(learning.patience(Phase.TRAINING, set(fleet)))
        for client in fleet[:6]:
            learning.record_duration(client, number, 2.0)
        for client in fleet[6:]:
            if number < 2:
                learning.record_duration(client, number, 2.0)
            else:
                learning.cut_off(client, number, asked_at=0.0, now=given[-1])
    assert given[2] == pytest.approx(6.0)
    assert given[2 + CHANCES + 1 :] == pytest.approx([6.0] * (60 - 2 - CHANCES - 1))


def test_a_training_time_is_recorded_if_the_client_is_selected_again_meanwhile(
    store: Store,
) -> None:
    learning = learned(store)
    learning.cut_off("slow", 20, asked_at=0.0, now=2.0)
    learning.cut_off("slow", 21, asked_at=2.0, now=6.0)
    learning.record_late_announcement("slow", 20, now=7.0)
    assert learning.patience(Phase.TRAINING, {"slow"}) == pytest.approx(14.0)


def test_a_target_a_plateau_and_a_time_limit_each_end_a_federation_with_a_reason() -> None:
    assert reason_to_end(StopConditions(), 1e9, [0.99] * 50) is None
    assert "60 s were allowed" in str(reason_to_end(StopConditions(after_seconds=60), 61, []))
    assert reason_to_end(StopConditions(worst_10_percent=0.7), 0, [0.8, 0.69]) is None
    assert "70.0 % was the target" in str(
        reason_to_end(StopConditions(worst_10_percent=0.7), 0, [0.71])
    )
    assert reason_to_end(StopConditions(plateau=3), 0, [0.5, 0.4, 0.4, 0.51]) is None
    assert "3 evaluations" in str(reason_to_end(StopConditions(plateau=3), 0, [0.5, 0.5, 0.4, 0.5]))


def test_evaluation_results_survive_a_restart(store: Store) -> None:
    settings = ServerSettings.model_validate({"end": {"worst_10_percent": 0.6}})
    before = Scheduler(settings, store)
    for client, accuracy in (("a", 0.5), ("b", 0.9)):
        before.scores.add(3, client, Evaluation(samples=5, accuracy=accuracy))
        evaluation = Evaluation(samples=5, loss=1.0, accuracy=accuracy)
        store.record([], Round(3), evaluation_write(3, client, evaluation, ""))
    restarted = Scheduler(settings, store)
    assert before.reason_to_end(0.0) is restarted.reason_to_end(0.0) is None
    restarted.scores.add(4, "a", Evaluation(samples=5, accuracy=0.7))
    assert "70.0 %" in str(restarted.reason_to_end(0.0))


def test_an_evaluation_continues_after_a_restart_with_its_results(store: Store) -> None:
    settings = ServerSettings.model_validate({"end": {"worst_10_percent": 0.6}})
    evaluation = Evaluation(samples=5, loss=1.0, accuracy=0.1)
    store.record([], Round(3), evaluation_write(3, "badly-served", evaluation, ""))
    restarted = Scheduler(settings, store)
    restarted.scores.add(3, "well-served", Evaluation(samples=5, accuracy=0.9))
    assert restarted.reason_to_end(0.0) is None
