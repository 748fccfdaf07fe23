"""Revocations, stops, restarts, and events that cannot happen."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from fairfleet.server.rounds.serialization import (
    event_from_json,
    round_from_json,
    round_to_json,
)
from fairfleet.server.rounds.state_machine import (
    ALL_ROUNDS_DONE,
    Aggregate,
    ClientLost,
    ClientRetired,
    ClientRevoked,
    ClientsChosen,
    DeadlinePassed,
    Finish,
    IllegalEvent,
    ModelStored,
    Phase,
    Policy,
    Release,
    Round,
    StopRequested,
    Train,
    UpdateStored,
    Wait,
    resume,
    step,
)
from tests.support.samples.rounds import POLICY, after, clients


def test_surplus_clients_stay_surplus_after_a_restart_unless_they_deliver() -> None:
    chosen = ClientsChosen(clients("a", "b", "c", "d"), wanted=2)
    full = after(Round(0), chosen, UpdateStored("a"), UpdateStored("b"))
    again, actions = resume(full, POLICY, clients("a"))  # b's update was only in memory
    assert (again.phase, actions, again.surplus) == (
        Phase.TRAINING,
        (Train(clients("b")),),
        clients("c", "d"),
    )
    assert after(again, UpdateStored("b")).surplus == clients("c", "d")
    done = after(again, UpdateStored("c"))
    assert (done.phase, done.surplus) == (Phase.AGGREGATING, clients("b", "d"))
    assert after(again, ClientRevoked("c")).surplus == clients("d")


def test_a_round_stored_by_an_older_version_is_readable() -> None:
    waiting = after(
        Round(0), ClientsChosen(clients("a", "b", "c", "d")), UpdateStored("a"), DeadlinePassed(0)
    )
    fields = json.loads(round_to_json(waiting))
    for field in ("retried", "gave_up", "deadlines_missed", "surplus"):
        del fields[field]
    assert round_from_json(json.dumps(fields)) == replace(waiting, deadlines_missed=0)
    assert event_from_json('{"event": "ClientLost", "client": "a"}') == ClientLost("a")


@pytest.mark.parametrize("lost_first", [True, False])
def test_a_round_does_not_wait_for_a_revoked_client(lost_first: bool) -> None:
    policy = Policy(rounds=3, quorum=1.0)
    training = after(
        Round(0),
        ClientsChosen(clients("a", "b", "c")),
        UpdateStored("a"),
        UpdateStored("b"),
        policy=policy,
    )
    if lost_first:
        training = after(training, ClientLost("c"), policy=policy)
        assert training.phase is Phase.WAITING
    done, actions = step(training, ClientRevoked("c"), policy)
    assert (done.phase, actions) == (Phase.AGGREGATING, (Aggregate(clients("a", "b")),))
    assert not done.takes_update_of("c")


def test_the_update_of_a_revoked_client_is_removed_while_updates_are_collected() -> None:
    policy = Policy(rounds=3, quorum=1.0)
    training = after(
        Round(0), ClientsChosen(clients("a", "b", "bad")), UpdateStored("bad"), policy=policy
    )
    remaining = after(training, ClientRevoked("bad"), policy=policy)
    assert (remaining.phase, remaining.received, remaining.wanted) == (Phase.TRAINING, clients(), 2)
    done, actions = step(
        after(remaining, UpdateStored("a"), policy=policy), UpdateStored("b"), policy
    )
    assert (done.phase, actions) == (Phase.AGGREGATING, (Aggregate(clients("a", "b")),))
    assert step(done, ClientRevoked("a"), policy) == (
        done,
        (),
    )  # too late: its model is being computed
    alone = after(
        Round(0),
        ClientsChosen(clients("bad", "b")),
        UpdateStored("bad"),
        ClientLost("b"),
        policy=policy,
    )
    assert after(alone, ClientRevoked("bad"), policy=policy).phase is Phase.WAITING


def test_a_round_waits_neither_for_a_retired_client_nor_for_another_in_its_place() -> None:
    policy = Policy(rounds=10, minimum_clients=2, quorum=1.0)
    training = after(
        Round(0), ClientsChosen(clients("a", "b", "c")), UpdateStored("a"), policy=policy
    )
    waiting = after(training, ClientRetired("c"), policy=policy)
    assert (waiting.phase, waiting.asked, waiting.wanted) == (Phase.TRAINING, clients("b"), 2)
    done = after(waiting, UpdateStored("b"), policy=policy)
    assert (done.phase, done.received) == (Phase.AGGREGATING, clients("a", "b"))


def test_the_update_of_a_client_that_retires_after_it_counts() -> None:
    training = after(Round(0), ClientsChosen(clients("a", "b")), UpdateStored("a"))
    assert after(training, ClientRetired("a")) == training


def test_revoking_a_surplus_client_does_not_lower_the_wanted_number() -> None:
    begun = after(Round(0), ClientsChosen(clients("a", "b", "c"), wanted=2), UpdateStored("a"))
    remaining = after(begun, ClientRevoked("c"))
    assert (remaining.phase, remaining.wanted) == (Phase.TRAINING, 2)


def test_a_restart_keeps_the_clock_running_for_lost_clients() -> None:
    alone = after(Round(0), ClientsChosen(clients("a", "b")), ClientLost("a"), ClientLost("b"))
    assert resume(alone, POLICY, frozenset()) == (alone, (Wait(),))


def test_a_stop_does_not_wait_forever_for_clients_that_hang() -> None:
    hanging = after(
        Round(1), ClientsChosen(clients("a", "b")), StopRequested("enough"), DeadlinePassed(0)
    )
    done, actions = step(hanging, DeadlinePassed(1), POLICY)
    assert (done.phase, done.asked) == (Phase.FINISHED, frozenset())
    assert actions == (Release(clients("a", "b")), Finish("enough"))


def test_a_stop_completes_the_current_round_first() -> None:
    assert after(Round(1), StopRequested("enough")).phase is Phase.FINISHED
    training = after(Round(1), ClientsChosen(clients("a")), StopRequested("enough"))
    assert training.phase is Phase.TRAINING
    assert after(training, UpdateStored("a"), ModelStored(2)).phase is Phase.FINISHED


def test_a_stop_after_all_clients_left_ends_the_federation() -> None:
    training = after(Round(1), ClientsChosen(clients("a", "b")), StopRequested("enough"))
    gone, actions = step(after(training, ClientLost("a")), ClientLost("b"), POLICY)
    assert (gone.phase, actions) == (Phase.FINISHED, (Finish("enough"),))


def test_impossible_events_raise_illegal_event() -> None:
    with pytest.raises(IllegalEvent, match="waiting"):
        step(Round(0), ModelStored(1), POLICY)
    with pytest.raises(IllegalEvent):
        step(after(Round(0), ClientsChosen(clients("a"))), ClientsChosen(clients("b")), POLICY)
    with pytest.raises(IllegalEvent):
        step(Round(0, Phase.AGGREGATING, received=clients("a")), ModelStored(7), POLICY)


def test_a_finished_federation_continues_if_the_policy_has_more_rounds() -> None:
    finished = Round(3, Phase.FINISHED, stopping=ALL_ROUNDS_DONE)
    assert resume(finished, POLICY, frozenset())[0].phase is Phase.FINISHED
    assert resume(finished, Policy(rounds=5), frozenset())[0].phase is Phase.WAITING
    stopped = replace(finished, stopping="stopped by an operator")
    assert resume(stopped, Policy(rounds=5), frozenset())[0].phase is Phase.FINISHED


def test_updates_that_were_only_in_memory_are_requested_again() -> None:
    aggregating = Round(0, Phase.AGGREGATING, wanted=2, received=clients("a", "b"))
    restored, actions = resume(aggregating, POLICY, clients("a"))
    assert (restored.phase, restored.received, actions) == (
        Phase.TRAINING,
        clients("a"),
        (Train(clients("b")),),
    )
