"""When a round waits, whom it asks beyond what it needs, and when a federation has trained enough."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairfleet.common.reports import Evaluation
from fairfleet.common.tensors import Model
from fairfleet.server.deadlines import CHANCES, Pace, adaptive
from fairfleet.server.endings import Ending, reason_to_end
from fairfleet.server.evaluation_records import evaluation_write
from fairfleet.server.rounds import Phase, Policy, Round
from fairfleet.server.scheduling import Scheduler
from fairfleet.server.sessions import Member, Session
from fairfleet.server.settings import ServerSettings
from fairfleet.server.store import Store


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = Store(tmp_path)
    store.create("test", Model.of({"w": np.zeros(2, np.float32)}), bytes(32))
    yield store
    store.close()


def sessions(count: int) -> list[Session]:
    members = [Member(f"c{k}", "", "", 10, 10, ("raw32",)) for k in range(count)]
    return [Session(member.client, 1, member, 0.0) for member in members]


def scheduler(store: Store, **round: object) -> Scheduler:
    return Scheduler(ServerSettings.model_validate({"round": round}), store)


def test_more_are_asked_than_are_needed_and_the_first_enough_are_taken(store: Store) -> None:
    chosen = scheduler(store, clients=10, over_selection=1.3).choose(Round(0), sessions(50))
    assert chosen is not None
    assert (len(chosen.clients), chosen.wanted) == (13, 10)
    few = scheduler(store, clients=10, over_selection=1.3).choose(Round(0), sessions(8))
    assert few is not None
    assert (len(few.clients), few.wanted) == (8, 8)


def test_nobody_is_asked_while_the_fleet_is_too_small_paused_or_complete(store: Store) -> None:
    picky = scheduler(store, clients=2, minimum_clients=3)
    assert picky.choose(Round(0), sessions(2)) is None
    assert "waiting for 1 more clients: 2 of at least 3" in picky.too_few(2)
    assert picky.choose(Round(0, paused=True), sessions(5)) is None
    assert picky.choose(Round(0, received=frozenset({"c0", "c1"})), sessions(5)) is None


def test_whoever_is_connected_evaluates_also_where_a_round_needs_more(store: Store) -> None:
    picky, over = scheduler(store, minimum_clients=3), Round(3, Phase.EVALUATING, stopping="all rounds are done")
    chosen = picky.choose(over, sessions(2))
    assert chosen is not None
    assert chosen.clients == {"c0", "c1"}
    assert picky.choose(over, []) is None, "somebody may still come"


def test_others_are_asked_in_the_place_of_those_who_stay_silent(store: Store) -> None:
    silent = Round(0, attempt=1, wanted=2, asked=frozenset({"c0", "c1"}))
    chosen = scheduler(store, clients=2).choose(silent, sessions(4))
    assert chosen is not None
    assert (chosen.clients, chosen.wanted) == ({"c2", "c3"}, 2)


def test_sampling_some_and_tolerating_missing_ones_are_two_settings() -> None:
    assert Policy(rounds=1, quorum=0.5).suffice(10) == 5
    assert Policy(rounds=1, quorum=0.5, tolerate_missing=2).suffice(10) == 8
    assert Policy(rounds=1, tolerate_missing=99).suffice(10) == 1


PACES = st.builds(Pace, st.floats(0, 1e4), st.integers(0, 9))


@given(st.lists(st.floats(0, 1e4), max_size=40), st.lists(PACES, max_size=5), st.floats(1, 10))
def test_an_adaptive_deadline_stays_within_its_limits(durations: list[float], asked: list[Pace], factor: float) -> None:
    assert 5.0 <= adaptive(durations, asked, longest=600.0, shortest=5.0, factor=factor) <= 600.0


def test_an_adaptive_deadline_is_learned_and_a_fixed_one_is_not(store: Store) -> None:
    learning = scheduler(store, deadline="adaptive", shortest_deadline_seconds=1, deadline_factor=2)
    fixed = scheduler(store)
    for one in (learning, fixed):
        assert one.patience(Phase.TRAINING, {"a"}) == 600.0
        for number in range(20):
            one.took("a", number, 4.0)
    assert learning.patience(Phase.TRAINING, {"a"}) == pytest.approx(8.0)
    assert fixed.patience(Phase.TRAINING, {"a"}) == 600.0


def learned(store: Store) -> Scheduler:
    """Nine quick clients, whose twenty trainings took 1 s each; the deadline is twice that."""
    learning = scheduler(store, deadline="adaptive", shortest_deadline_seconds=1, deadline_factor=2)
    for number in range(20):
        for k in range(9):
            learning.took(f"quick-{k}", number, 1.0)
    return learning


def test_a_client_that_is_cut_off_gets_longer_each_time_until_it_answers(store: Store) -> None:
    learning, needs = learned(store), 11.0
    given = []
    for number in range(20, 30):
        given.append(learning.patience(Phase.TRAINING, {"slow", "quick-0"}))
        if given[-1] >= needs:
            learning.took("slow", number, needs)
            break
        learning.cut_off("slow", number, asked_at=0.0, now=given[-1])
    assert given == pytest.approx([2.0, 4.0, 8.0, 16.0])
    assert learning.patience(Phase.TRAINING, {"quick-0"}) == pytest.approx(2.0)  # nobody else waits longer


def test_the_slow_are_counted_among_the_fleet_also_while_they_are_cut_off(store: Store) -> None:
    learning = learned(store)
    for number in range(20, 20 + CHANCES):
        for k in range(9):
            learning.cut_off(f"slow-{k}", number, asked_at=0.0, now=5.0)
    assert learning.patience(Phase.TRAINING, {"quick-0"}) == pytest.approx(10.0)


def test_a_late_arrival_tells_how_long_its_training_took(store: Store) -> None:
    learning = learned(store)
    learning.cut_off("slow", 20, asked_at=100.0, now=102.0)
    learning.came_late("slow", 20, now=130.0)
    assert learning.patience(Phase.TRAINING, {"slow"}) == pytest.approx(60.0)
    learning.came_late("slow", 20, now=900.0)  # announced once more: nothing new
    assert learning.patience(Phase.TRAINING, {"slow"}) == pytest.approx(60.0)
    learning.came_late("quick-0", 20, now=900.0)  # never cut off
    assert learning.patience(Phase.TRAINING, {"quick-0"}) == pytest.approx(2.0)


def test_a_client_that_hangs_does_not_hold_up_the_fleet_for_ever(store: Store) -> None:
    learning = learned(store)
    for number in range(20, 20 + CHANCES + 1):
        learning.cut_off("hangs", number, 0.0, learning.patience(Phase.TRAINING, {"hangs"}))
    assert learning.patience(Phase.TRAINING, {"hangs"}) == pytest.approx(2.0)


def test_a_fleet_of_which_a_quarter_hangs_comes_back_to_the_deadline_of_the_others(store: Store) -> None:
    fleet = [f"c{k}" for k in range(8)]
    learning = scheduler(store, deadline="adaptive", shortest_deadline_seconds=1)
    given = []
    for number in range(60):
        given.append(learning.patience(Phase.TRAINING, set(fleet)))
        for client in fleet[:6]:
            learning.took(client, number, 2.0)
        for client in fleet[6:]:
            if number < 2:
                learning.took(client, number, 2.0)
            else:
                learning.cut_off(client, number, asked_at=0.0, now=given[-1])
    assert given[2] == pytest.approx(6.0)
    assert given[2 + CHANCES + 1 :] == pytest.approx([6.0] * (60 - 2 - CHANCES - 1))


def test_a_client_asked_anew_while_it_trains_on_still_tells_how_long_that_took(store: Store) -> None:
    learning = learned(store)
    learning.cut_off("slow", 20, asked_at=0.0, now=2.0)
    learning.cut_off("slow", 21, asked_at=2.0, now=6.0)
    learning.came_late("slow", 20, now=7.0)
    assert learning.patience(Phase.TRAINING, {"slow"}) == pytest.approx(14.0)


def test_a_target_a_plateau_and_a_time_each_end_a_federation_and_say_so() -> None:
    assert reason_to_end(Ending(), 1e9, [0.99] * 50) is None
    assert "60 s were allowed" in str(reason_to_end(Ending(after_seconds=60), 61, []))
    assert reason_to_end(Ending(worst_10_percent=0.7), 0, [0.8, 0.69]) is None
    assert "70.0 % was the target" in str(reason_to_end(Ending(worst_10_percent=0.7), 0, [0.71]))
    assert reason_to_end(Ending(plateau=3), 0, [0.5, 0.4, 0.4, 0.51]) is None
    assert "3 evaluations" in str(reason_to_end(Ending(plateau=3), 0, [0.5, 0.5, 0.4, 0.5]))


def test_what_evaluations_found_is_known_after_a_restart(store: Store) -> None:
    settings = ServerSettings.model_validate({"end": {"worst_10_percent": 0.6}})
    before = Scheduler(settings, store)
    for client, accuracy in (("a", 0.5), ("b", 0.9)):
        before.evaluated(3, client, accuracy)
        found = Evaluation(samples=5, loss=1.0, accuracy=accuracy)
        store.record([], Round(3), evaluation_write(3, client, found, ""))
    restarted = Scheduler(settings, store)
    assert before.reason_to_end(0.0) is restarted.reason_to_end(0.0) is None
    restarted.evaluated(4, "a", 0.7)
    assert "70.0 %" in str(restarted.reason_to_end(0.0))


def test_an_evaluation_that_goes_on_after_a_restart_keeps_what_it_had_found(store: Store) -> None:
    settings = ServerSettings.model_validate({"end": {"worst_10_percent": 0.6}})
    found = Evaluation(samples=5, loss=1.0, accuracy=0.1)
    store.record([], Round(3), evaluation_write(3, "badly-served", found, ""))
    restarted = Scheduler(settings, store)
    restarted.evaluated(3, "well-served", 0.9)
    assert restarted.reason_to_end(0.0) is None
