"""Phases after aggregation: trials of a step, and evaluation of the new model."""

from __future__ import annotations

import pytest

from fairfleet.server.rounds.state_machine import (
    ALL_ROUNDS_DONE,
    Aggregate,
    ClientLost,
    ClientRevoked,
    ClientsChosen,
    Commit,
    DeadlinePassed,
    Evaluate,
    Evaluated,
    Finish,
    IllegalEvent,
    ModelStored,
    Phase,
    Policy,
    Release,
    Round,
    StepProposed,
    StepTried,
    StopRequested,
    Train,
    Verify,
    Wait,
    resume,
    step,
)
from tests.support.samples.rounds import POLICY, after, clients


def test_models_are_evaluated_when_due_and_at_the_end() -> None:
    policy = Policy(rounds=3, evaluate_every=2)
    for version, phase in ((1, Phase.WAITING), (2, Phase.EVALUATING), (3, Phase.EVALUATING)):
        round_ = Round(version - 1, Phase.AGGREGATING, received=clients("a"))
        assert after(round_, ModelStored(version), policy=policy).phase is phase
    last = Round(3, Phase.EVALUATING)
    chosen, actions = step(last, ClientsChosen(clients("a", "b")), policy)
    assert actions == (Evaluate(clients("a", "b")),)
    finished, actions = step(after(chosen, Evaluated("a"), policy=policy), ClientLost("b"), policy)
    assert (finished.phase, actions) == (Phase.FINISHED, (Finish(ALL_ROUNDS_DONE),))


def test_an_evaluation_without_clients_is_skipped() -> None:
    assert after(Round(2, Phase.EVALUATING), ClientsChosen(frozenset())).phase is Phase.WAITING


def test_an_evaluation_deadline_releases_silent_clients() -> None:
    evaluating = after(Round(2, Phase.EVALUATING), ClientsChosen(clients("a", "b")))
    following, actions = step(evaluating, DeadlinePassed(0), POLICY)
    assert (following.phase, actions) == (Phase.WAITING, (Release(clients("a", "b")),))


def test_an_evaluation_does_not_wait_forever_for_clients() -> None:
    committed, actions = step(
        Round(2, Phase.AGGREGATING, received=clients("a")),
        ModelStored(3),
        Policy(3, evaluate_every=1),
    )
    assert (committed.phase, actions) == (Phase.EVALUATING, (Wait(),))
    assert after(committed, DeadlinePassed(0)).phase is Phase.FINISHED
    assert after(Round(2, Phase.EVALUATING), StopRequested("enough")).phase is Phase.FINISHED


def proposed(*names: str) -> Round:
    """Return a round whose step these clients are to try."""
    aggregating = Round(0, Phase.AGGREGATING, wanted=3, received=clients("a", "b", "c"))
    return after(aggregating, StepProposed(clients(*names)))


def test_a_step_is_committed_when_all_participants_have_tried_it() -> None:
    aggregating = Round(0, Phase.AGGREGATING, wanted=2, received=clients("a", "b"))
    verifying, actions = step(aggregating, StepProposed(clients("a", "b")), POLICY)
    assert (verifying.phase, actions) == (Phase.VERIFYING, (Verify(clients("a", "b")),))
    answered = after(verifying, StepTried("a"))
    assert (answered.phase, answered.asked) == (Phase.VERIFYING, clients("b"))
    done, actions = step(answered, StepTried("b"), POLICY)
    assert (done.phase, actions) == (Phase.COMMITTING, (Commit(),))
    assert after(done, ModelStored(1)).number == 1


def test_a_step_that_no_client_can_try_is_decided_at_once() -> None:
    aggregating = Round(0, Phase.AGGREGATING, received=clients("a"))
    done, actions = step(aggregating, StepProposed(clients()), POLICY)
    assert (done.phase, actions) == (Phase.COMMITTING, (Commit(),))


def test_a_verification_waits_neither_for_lost_clients_nor_past_its_deadline() -> None:
    remaining = after(proposed("a", "b", "c"), ClientLost("a"), ClientRevoked("b"))
    assert (remaining.phase, remaining.asked) == (Phase.VERIFYING, clients("c"))
    done, actions = step(remaining, DeadlinePassed(0), POLICY)
    assert (done.phase, actions) == (Phase.COMMITTING, (Release(clients("c")), Commit()))
    assert step(done, StepTried("c"), POLICY) == (done, ())  # too late to be of use
    # A client that is silent now has still delivered its update.
    assert done.received == clients("a", "b", "c")


def test_only_participants_can_try_a_step() -> None:
    with pytest.raises(IllegalEvent):
        proposed("d")


@pytest.mark.parametrize("answered", [False, True])
def test_after_a_restart_the_step_is_computed_again(answered: bool) -> None:
    verifying = after(proposed("a"), StepTried("a")) if answered else proposed("a")
    restored, actions = resume(verifying, POLICY, clients("a", "b", "c"))
    assert (restored.phase, restored.asked) == (Phase.AGGREGATING, clients())
    assert actions == (Aggregate(clients("a", "b", "c")),)
    lost, actions = resume(verifying, POLICY, clients("a", "b"))
    assert (lost.phase, actions) == (Phase.TRAINING, (Train(clients("c")),))
