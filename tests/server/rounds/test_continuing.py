"""A finished round goes on, or a later one begins, by one event; everything else is ignored."""

from __future__ import annotations

from fairfleet.server.rounds.limits import ContinuedLimits, Limits, limits_in_force
from fairfleet.server.rounds.serialization import (
    event_from_json,
    event_to_json,
    round_from_json,
    round_to_json,
)
from fairfleet.server.rounds.state_machine import Continued, Phase, Policy, Round, resume, step

POLICY = Policy(rounds=9)
FINISHED = Round(5, Phase.FINISHED, paused=True, stopping="enough")


def test_a_finished_federation_waits_for_clients_again() -> None:
    assert step(FINISHED, Continued(5), POLICY) == (Round(5, paused=True), ())


def test_a_federation_that_goes_back_does_so_at_the_next_version() -> None:
    assert step(FINISHED, Continued(6, from_version=2), POLICY) == (Round(6, paused=True), ())


def test_an_event_of_another_version_continues_nothing() -> None:
    for event in (Continued(4), Continued(6), Continued(5, from_version=2)):
        assert step(FINISHED, event, POLICY) == (FINISHED, ())


def test_an_end_that_is_to_come_is_withdrawn_and_the_round_stays_as_it_is() -> None:
    asked = frozenset("ab")
    training = Round(5, Phase.TRAINING, wanted=2, asked=asked, stopping="enough")
    after, actions = step(training, Continued(5), POLICY)
    assert (after, actions) == (Round(5, Phase.TRAINING, wanted=2, asked=asked), ())


def test_clients_selected_before_the_end_get_tasks_with_other_names() -> None:
    stopped = Round(5, Phase.FINISHED, attempt=1, wanted=2, stopping="enough")
    after, _ = step(stopped, Continued(5), POLICY)
    assert (after.attempt, after.wanted) == (2, 0)


def test_a_continued_round_survives_a_restart_and_its_event_can_be_read() -> None:
    event = Continued(6, from_version=2)
    assert event_from_json(event_to_json(event)) == event
    after, _ = step(FINISHED, event, POLICY)
    assert resume(round_from_json(round_to_json(after)), POLICY, frozenset()) == (after, ())


def test_a_given_limit_holds_until_its_own_setting_changes() -> None:
    continued = ContinuedLimits(settings=Limits(100, None), given=Limits(150, 90.0))
    assert ContinuedLimits.from_json(continued.to_json()) == continued
    assert limits_in_force(Limits(100), continued) == Limits(150, 90.0)
    assert limits_in_force(Limits(100, 60.0), continued) == Limits(150, 60.0)
    assert limits_in_force(Limits(120), continued) == Limits(120, 90.0)
    assert limits_in_force(Limits(100), None) == Limits(100)
