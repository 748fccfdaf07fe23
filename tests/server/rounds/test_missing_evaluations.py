"""Clients that give no result in an evaluation are recorded with the reason."""

from __future__ import annotations

from fairfleet.server.rounds import state_machine
from fairfleet.server.rounds.missing_evaluations import (
    GONE,
    NO_TEST_DATA,
    SILENT,
    missing_evaluations,
)
from fairfleet.server.rounds.state_machine import Phase, Policy, Round

POLICY = Policy(rounds=10, evaluate_every=1)
EVALUATING = Round(4, Phase.EVALUATING, asked=frozenset({"ann", "bob"}))


def missing(
    before: Round, event: state_machine.Event, *unable: tuple[str, str]
) -> list[tuple[int, str, str]]:
    """Return the clients without a result after one event, as plain tuples."""
    after, _ = state_machine.step(before, event, POLICY)
    evaluations = missing_evaluations([(before, event, after)], lambda: unable)
    return [tuple(evaluation) for evaluation in evaluations]


def test_clients_that_are_silent_at_the_deadline_are_recorded() -> None:
    assert missing(EVALUATING, state_machine.DeadlinePassed(0)) == [
        (4, "ann", SILENT),
        (4, "bob", SILENT),
    ]


def test_clients_that_are_gone_or_revoked_are_recorded_once() -> None:
    assert missing(EVALUATING, state_machine.ClientLost("ann")) == [(4, "ann", GONE)]
    assert missing(EVALUATING, state_machine.ClientRevoked("bob")) == [(4, "bob", GONE)]
    assert missing(EVALUATING, state_machine.ClientLost("dan")) == []


def test_clients_that_cannot_evaluate_are_recorded_when_the_others_are_selected() -> None:
    fresh, chosen = Round(4, Phase.EVALUATING), state_machine.ClientsChosen(frozenset({"ann"}))
    assert missing(fresh, chosen, ("dan", NO_TEST_DATA)) == [(4, "dan", NO_TEST_DATA)]


def test_nobody_is_recorded_after_an_answer_or_while_a_round_trains() -> None:
    assert missing(EVALUATING, state_machine.Evaluated("ann")) == []
    training = Round(4, Phase.TRAINING, wanted=2, asked=frozenset({"ann", "bob"}))
    assert missing(training, state_machine.ClientLost("ann")) == []
