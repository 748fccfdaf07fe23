from __future__ import annotations

from fairfleet.server import rounds
from fairfleet.server.evaluating import GONE, NO_TEST_DATA, SILENT, unanswered
from fairfleet.server.rounds import Phase, Policy, Round
from fairfleet.server.sessions import Member, Sessions

POLICY = Policy(rounds=10, evaluate_every=1)
EVALUATING = Round(4, Phase.EVALUATING, asked=frozenset({"ann", "bob"}))


def connected(**test_samples: int) -> Sessions:
    sessions = Sessions(30.0, 100, 1)
    for client, count in test_samples.items():
        sessions.join(Member(client, "i", "cpu", 10, count, ()), 0.0)
    return sessions


def told(before: Round, event: rounds.Event, sessions: Sessions | None = None) -> list[tuple[int, str, str]]:
    after, _ = rounds.step(before, event, POLICY)
    return [tuple(each) for each in unanswered([(before, event, after)], sessions or connected())]


def test_who_is_silent_at_the_deadline_is_named() -> None:
    assert told(EVALUATING, rounds.DeadlinePassed(0)) == [(4, "ann", SILENT), (4, "bob", SILENT)]


def test_who_is_gone_or_shut_out_is_named_once() -> None:
    assert told(EVALUATING, rounds.ClientLost("ann")) == [(4, "ann", GONE)]
    assert told(EVALUATING, rounds.ClientRevoked("bob")) == [(4, "bob", GONE)]
    assert told(EVALUATING, rounds.ClientLost("dan")) == []


def test_who_has_no_test_data_is_named_when_the_others_are_chosen() -> None:
    fresh, chosen = Round(4, Phase.EVALUATING), rounds.ClientsChosen(frozenset({"ann"}))
    assert told(fresh, chosen, connected(ann=5, dan=0)) == [(4, "dan", NO_TEST_DATA)]


def test_who_answers_is_not_named_nor_anybody_while_a_round_trains() -> None:
    assert told(EVALUATING, rounds.Evaluated("ann")) == []
    training = Round(4, Phase.TRAINING, wanted=2, asked=frozenset({"ann", "bob"}))
    assert told(training, rounds.ClientLost("ann")) == []
