"""When a round aggregates: answers, quorum, deadlines, and clients that fail."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairfleet.server.rounds.serialization import (
    round_from_json,
    round_to_json,
)
from fairfleet.server.rounds.state_machine import (
    Aggregate,
    ClientLost,
    ClientRevoked,
    ClientsChosen,
    DeadlinePassed,
    IllegalEvent,
    ModelStored,
    Phase,
    Policy,
    Release,
    Round,
    Train,
    UpdateStored,
    Wait,
    step,
)
from tests.support.samples.rounds import POLICY, after, clients


def test_a_round_aggregates_when_all_clients_have_answered() -> None:
    training = after(Round(0), ClientsChosen(clients("a", "b")), UpdateStored("a"))
    assert training.phase is Phase.TRAINING
    done, actions = step(training, UpdateStored("b"), POLICY)
    assert (done.phase, actions) == (Phase.AGGREGATING, (Aggregate(clients("a", "b")),))


def test_at_the_deadline_a_quorum_is_aggregated_and_the_rest_released() -> None:
    training = after(
        Round(0), ClientsChosen(clients("a", "b", "c", "d")), UpdateStored("a"), UpdateStored("b")
    )
    done, actions = step(training, DeadlinePassed(0), POLICY)
    assert actions == (Release(clients("c", "d")), Aggregate(clients("a", "b")))
    assert done.lost == clients("c", "d")


def test_the_wanted_number_of_updates_ends_the_round() -> None:
    begun = after(Round(0), ClientsChosen(clients("a", "b", "c"), wanted=2), UpdateStored("c"))
    assert begun.phase is Phase.TRAINING
    done, actions = step(begun, UpdateStored("a"), POLICY)
    assert (done.phase, actions) == (
        Phase.AGGREGATING,
        (Release(clients("b")), Aggregate(clients("a", "c"))),
    )


def test_only_clients_that_owe_an_update_at_a_deadline_are_late() -> None:
    chosen = ClientsChosen(clients("a", "b", "left", "slow"))
    cut = after(
        Round(0),
        chosen,
        ClientLost("left"),
        UpdateStored("a"),
        UpdateStored("b"),
        DeadlinePassed(0),
    )
    assert (cut.phase, cut.lost, cut.late) == (
        Phase.AGGREGATING,
        clients("left", "slow"),
        clients("slow"),
    )
    surplus = after(
        Round(0),
        ClientsChosen(clients("a", "b", "c"), wanted=2),
        UpdateStored("a"),
        UpdateStored("b"),
    )
    assert (surplus.phase, surplus.lost, surplus.late) == (
        Phase.AGGREGATING,
        clients("c"),
        clients(),
    )


def test_only_clients_that_a_full_round_did_not_wait_for_are_surplus() -> None:
    chosen = ClientsChosen(clients("a", "b", "left", "slow"), wanted=2)
    full = after(Round(0), chosen, ClientLost("left"), UpdateStored("a"), UpdateStored("b"))
    assert (full.phase, full.lost, full.surplus) == (
        Phase.AGGREGATING,
        clients("left", "slow"),
        clients("slow"),
    )
    assert round_from_json(round_to_json(full)) == full
    cut = after(
        Round(0),
        ClientsChosen(clients("a", "b", "slow")),
        UpdateStored("a"),
        UpdateStored("b"),
        DeadlinePassed(0),
    )
    assert (cut.phase, cut.lost, cut.surplus) == (Phase.AGGREGATING, clients("slow"), clients())


def test_an_update_after_the_deadline_but_before_aggregation_is_not_late() -> None:
    waiting = after(
        Round(0), ClientsChosen(clients("a", "b", "c", "d")), UpdateStored("a"), DeadlinePassed(0)
    )
    assert (waiting.phase, waiting.late) == (Phase.WAITING, clients("b", "c", "d"))
    assert round_from_json(round_to_json(waiting)) == waiting
    done = after(waiting, ClientRevoked("d"), UpdateStored("b"))
    assert (done.phase, done.late) == (Phase.AGGREGATING, clients("c"))


def test_after_a_missed_quorum_updates_are_kept_and_more_clients_selected() -> None:
    short = after(
        Round(0), ClientsChosen(clients("a", "b", "c", "d")), UpdateStored("a"), DeadlinePassed(0)
    )
    assert (short.phase, short.attempt, short.received) == (Phase.WAITING, 1, clients("a"))
    more, actions = step(short, ClientsChosen(clients("e")), POLICY)
    assert actions == (Train(clients("e")),)
    assert more.asked == clients("b", "c", "d", "e")
    assert after(more, UpdateStored("e"), DeadlinePassed(1)).phase is Phase.AGGREGATING


def test_a_late_update_of_an_earlier_attempt_still_counts() -> None:
    short = after(
        Round(0), ClientsChosen(clients("a", "b", "c", "d")), UpdateStored("a"), DeadlinePassed(0)
    )
    done, actions = step(short, UpdateStored("b"), POLICY)
    assert done.phase is Phase.AGGREGATING
    assert Aggregate(clients("a", "b")) in actions


def test_a_lost_client_that_returns_in_time_counts() -> None:
    training = after(Round(0), ClientsChosen(clients("a", "b")), ClientLost("a"))
    assert training.takes_update_of("a")
    assert after(training, UpdateStored("a")).received == clients("a")


def test_losing_all_clients_begins_another_attempt() -> None:
    gone = after(Round(0), ClientsChosen(clients("a", "b")), ClientLost("a"), ClientLost("b"))
    assert (gone.phase, gone.attempt, gone.lost) == (Phase.WAITING, 1, clients("a", "b"))


def test_a_repeated_update_changes_nothing() -> None:
    training = after(Round(0), ClientsChosen(clients("a", "b")), UpdateStored("a"))
    assert step(training, UpdateStored("a"), POLICY) == (training, ())


def test_after_a_missed_quorum_the_minimum_suffices_at_the_next_deadline() -> None:
    policy = Policy(rounds=3, quorum=1.0, minimum_clients=2)
    training = after(
        Round(0), ClientsChosen(clients("a", "b", "c")), UpdateStored("a"), policy=policy
    )
    short, actions = step(after(training, ClientLost("b"), policy=policy), ClientLost("c"), policy)
    assert (short.phase, actions) == (Phase.WAITING, (Wait(),))
    assert step(short, DeadlinePassed(1), policy) == (short, (Wait(),))  # one is too few
    two = after(short, UpdateStored("b"), policy=policy)
    assert two.phase is Phase.WAITING
    done, actions = step(two, DeadlinePassed(1), policy)
    assert (done.phase, done.lost, actions) == (
        Phase.AGGREGATING,
        clients("c"),
        (Aggregate(clients("a", "b")),),
    )


def test_a_client_that_gave_up_is_not_selected_again_but_its_update_counts() -> None:
    policy = Policy(rounds=3, quorum=1.0, minimum_clients=2)
    chosen = ClientsChosen(clients("a", "b", "fails", "silent"))
    begun = after(
        Round(0), chosen, ClientLost("fails", gave_up=True), UpdateStored("a"), policy=policy
    )
    short = after(begun, UpdateStored("b"), DeadlinePassed(0), policy=policy)
    assert (short.phase, short.gave_up, short.deadlines_missed) == (
        Phase.WAITING,
        clients("fails"),
        1,
    )
    with pytest.raises(IllegalEvent):
        step(short, ClientsChosen(clients("fails")), policy)
    assert after(short, UpdateStored("fails"), policy=policy).received == clients("a", "b", "fails")
    done, _ = step(short, DeadlinePassed(1), policy)
    assert (done.phase, done.received) == (Phase.AGGREGATING, clients("a", "b"))
    assert after(done, ModelStored(1), policy=policy) == Round(1)


def test_the_second_deadline_ends_a_round_even_while_others_train() -> None:
    policy = Policy(rounds=3, quorum=1.0, minimum_clients=2)
    short = after(
        Round(0),
        ClientsChosen(clients("a", "b", "c")),
        UpdateStored("a"),
        DeadlinePassed(0),
        policy=policy,
    )
    training = after(short, ClientsChosen(clients("d")), policy=policy)
    alone = after(training, DeadlinePassed(1), policy=policy)
    assert (alone.phase, alone.deadlines_missed) == (Phase.WAITING, 2)  # one is too few
    again = after(alone, ClientsChosen(clients("e")), UpdateStored("b"), policy=policy)
    assert after(again, DeadlinePassed(2), policy=policy).phase is Phase.AGGREGATING


def test_clients_that_gave_up_are_selected_again_if_the_round_needs_them() -> None:
    failed = after(Round(0), ClientsChosen(clients("a")), ClientLost("a", gave_up=True))
    waited, actions = step(failed, DeadlinePassed(1), POLICY)
    assert (waited.gave_up, actions) == (clients(), (Wait(),))
    assert after(waited, ClientsChosen(clients("a")), UpdateStored("a")).phase is Phase.AGGREGATING


@given(
    behaviours=st.lists(
        st.sampled_from(("delivers", "fails", "silent", "comes and goes")), min_size=2, max_size=8
    ),
    quorum=st.sampled_from((0.5, 0.8, 1.0)),
    minimum=st.integers(1, 3),
)
def test_failing_clients_cannot_stall_a_round(
    behaviours: list[str], quorum: float, minimum: int
) -> None:
    """Two deadlines suffice if the minimum of clients deliver, whatever the others do."""
    policy, fleet = (
        Policy(3, quorum, minimum_clients=minimum),
        dict(zip("abcdefgh", behaviours, strict=False)),
    )
    if behaviours.count("delivers") < minimum:
        return
    round_, times_chosen, deadlines = Round(0), Counter[str](), 0
    while round_.phase is not Phase.AGGREGATING:
        if round_.phase is Phase.WAITING and (chosen := frozenset(fleet) - round_.unavailable()):
            times_chosen.update(chosen)
            round_ = after(round_, ClientsChosen(chosen), policy=policy)
        elif owing := [client for client in sorted(round_.asked) if fleet[client] != "silent"]:
            behaviour = fleet[owing[0]]
            delivers = behaviour == "delivers"
            event = (
                UpdateStored(owing[0])
                if delivers
                else ClientLost(owing[0], gave_up=behaviour == "fails")
            )
            round_ = after(round_, event, policy=policy)
        else:
            deadlines += 1
            round_ = after(round_, DeadlinePassed(round_.attempt), policy=policy)
        assert deadlines <= 2, f"stalled: {round_}"
        most = {"fails": 1, "comes and goes": 2, "silent": 1, "delivers": 1}
        assert all(times <= most[fleet[client]] for client, times in times_chosen.items())


def test_an_update_after_two_deadlines_without_any_is_aggregated() -> None:
    policy = Policy(rounds=3, quorum=1.0)
    short = after(Round(0), ClientsChosen(clients("a", "b")), DeadlinePassed(0), policy=policy)
    assert step(short, DeadlinePassed(1), policy) == (short, (Wait(),))  # the clock keeps running
    answered = after(short, UpdateStored("a"), policy=policy)
    assert after(answered, DeadlinePassed(1), policy=policy).phase is Phase.AGGREGATING
