"""The round as a pure state machine: every sequence of events keeps its promises."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from fairfleet.server.journal import event_from_json, event_to_json, round_from_json, round_to_json
from fairfleet.server.rounds import (
    ALL_ROUNDS_DONE,
    Aggregate,
    ClientLost,
    ClientRevoked,
    ClientsChosen,
    Commit,
    DeadlinePassed,
    Evaluate,
    Evaluated,
    Event,
    Finish,
    IllegalEvent,
    ModelStored,
    Paused,
    Phase,
    Policy,
    Release,
    Resumed,
    Round,
    StepProposed,
    StepTried,
    StopRequested,
    Train,
    UpdateStored,
    Verify,
    Wait,
    resume,
    step,
)

POLICY = Policy(rounds=3, quorum=0.5)


def people(*names: str) -> frozenset[str]:
    return frozenset(names)


def after(round: Round, *events: Event, policy: Policy = POLICY) -> Round:
    for event in events:
        round, _ = step(round, event, policy)
    return round


def test_a_round_goes_on_when_everyone_has_answered() -> None:
    training = after(Round(0), ClientsChosen(people("a", "b")), UpdateStored("a"))
    assert training.phase is Phase.TRAINING
    done, actions = step(training, UpdateStored("b"), POLICY)
    assert (done.phase, actions) == (Phase.AGGREGATING, (Aggregate(people("a", "b")),))


def test_the_deadline_takes_a_quorum_and_releases_the_rest() -> None:
    training = after(Round(0), ClientsChosen(people("a", "b", "c", "d")), UpdateStored("a"), UpdateStored("b"))
    done, actions = step(training, DeadlinePassed(0), POLICY)
    assert actions == (Release(people("c", "d")), Aggregate(people("a", "b")))
    assert done.lost == people("c", "d")


def test_the_first_enough_of_those_asked_end_the_round() -> None:
    begun = after(Round(0), ClientsChosen(people("a", "b", "c"), wanted=2), UpdateStored("c"))
    assert begun.phase is Phase.TRAINING
    done, actions = step(begun, UpdateStored("a"), POLICY)
    assert (done.phase, actions) == (Phase.AGGREGATING, (Release(people("b")), Aggregate(people("a", "c"))))


def test_only_those_who_owe_an_update_when_a_deadline_passes_are_late() -> None:
    chosen = ClientsChosen(people("a", "b", "left", "slow"))
    cut = after(Round(0), chosen, ClientLost("left"), UpdateStored("a"), UpdateStored("b"), DeadlinePassed(0))
    assert (cut.phase, cut.lost, cut.late) == (Phase.AGGREGATING, people("left", "slow"), people("slow"))
    surplus = after(Round(0), ClientsChosen(people("a", "b", "c"), wanted=2), UpdateStored("a"), UpdateStored("b"))
    assert (surplus.phase, surplus.lost, surplus.late) == (Phase.AGGREGATING, people("c"), people())


def test_whoever_comes_after_the_deadline_but_before_the_round_goes_on_is_not_late() -> None:
    waiting = after(Round(0), ClientsChosen(people("a", "b", "c", "d")), UpdateStored("a"), DeadlinePassed(0))
    assert (waiting.phase, waiting.late) == (Phase.WAITING, people("b", "c", "d"))
    assert round_from_json(round_to_json(waiting)) == waiting
    done = after(waiting, ClientRevoked("d"), UpdateStored("b"))
    assert (done.phase, done.late) == (Phase.AGGREGATING, people("c"))


def test_a_missed_quorum_keeps_what_came_in_and_asks_more() -> None:
    short = after(Round(0), ClientsChosen(people("a", "b", "c", "d")), UpdateStored("a"), DeadlinePassed(0))
    assert (short.phase, short.attempt, short.received) == (Phase.WAITING, 1, people("a"))
    more, actions = step(short, ClientsChosen(people("e")), POLICY)
    assert actions == (Train(people("e")),)
    assert more.asked == people("b", "c", "d", "e")
    assert after(more, UpdateStored("e"), DeadlinePassed(1)).phase is Phase.AGGREGATING


def test_a_straggler_of_an_earlier_attempt_still_counts() -> None:
    short = after(Round(0), ClientsChosen(people("a", "b", "c", "d")), UpdateStored("a"), DeadlinePassed(0))
    done, actions = step(short, UpdateStored("b"), POLICY)
    assert done.phase is Phase.AGGREGATING
    assert Aggregate(people("a", "b")) in actions


def test_a_client_that_was_lost_and_comes_back_in_time_counts() -> None:
    training = after(Round(0), ClientsChosen(people("a", "b")), ClientLost("a"))
    assert training.takes_update_of("a")
    assert after(training, UpdateStored("a")).received == people("a")


def test_losing_everyone_begins_another_attempt() -> None:
    gone = after(Round(0), ClientsChosen(people("a", "b")), ClientLost("a"), ClientLost("b"))
    assert (gone.phase, gone.attempt, gone.lost) == (Phase.WAITING, 1, people("a", "b"))


def test_a_repeated_update_changes_nothing() -> None:
    training = after(Round(0), ClientsChosen(people("a", "b")), UpdateStored("a"))
    assert step(training, UpdateStored("a"), POLICY) == (training, ())


def test_evaluation_comes_when_it_is_due_and_at_the_end() -> None:
    policy = Policy(rounds=3, evaluate_every=2)
    for version, phase in ((1, Phase.WAITING), (2, Phase.EVALUATING), (3, Phase.EVALUATING)):
        round = Round(version - 1, Phase.AGGREGATING, received=people("a"))
        assert after(round, ModelStored(version), policy=policy).phase is phase
    last = Round(3, Phase.EVALUATING)
    chosen, actions = step(last, ClientsChosen(people("a", "b")), policy)
    assert actions == (Evaluate(people("a", "b")),)
    finished, actions = step(after(chosen, Evaluated("a"), policy=policy), ClientLost("b"), policy)
    assert (finished.phase, actions) == (Phase.FINISHED, (Finish(ALL_ROUNDS_DONE),))


def test_an_evaluation_that_nobody_can_do_is_passed_over() -> None:
    assert after(Round(2, Phase.EVALUATING), ClientsChosen(frozenset())).phase is Phase.WAITING


def test_an_evaluation_deadline_releases_the_silent() -> None:
    asked = after(Round(2, Phase.EVALUATING), ClientsChosen(people("a", "b")))
    round, actions = step(asked, DeadlinePassed(0), POLICY)
    assert (round.phase, actions) == (Phase.WAITING, (Release(people("a", "b")),))


def test_an_evaluation_does_not_wait_for_ever_for_clients() -> None:
    committed, actions = step(
        Round(2, Phase.AGGREGATING, received=people("a")), ModelStored(3), Policy(3, evaluate_every=1)
    )
    assert (committed.phase, actions) == (Phase.EVALUATING, (Wait(),))
    assert after(committed, DeadlinePassed(0)).phase is Phase.FINISHED
    assert after(Round(2, Phase.EVALUATING), StopRequested("enough")).phase is Phase.FINISHED


def test_a_missed_quorum_is_waited_for_until_the_next_deadline_then_the_minimum_suffices() -> None:
    policy = Policy(rounds=3, quorum=1.0, minimum_clients=2)
    training = after(Round(0), ClientsChosen(people("a", "b", "c")), UpdateStored("a"), policy=policy)
    short, actions = step(after(training, ClientLost("b"), policy=policy), ClientLost("c"), policy)
    assert (short.phase, actions) == (Phase.WAITING, (Wait(),))
    assert step(short, DeadlinePassed(1), policy) == (short, (Wait(),))  # one is too few
    two = after(short, UpdateStored("b"), policy=policy)
    assert two.phase is Phase.WAITING
    done, actions = step(two, DeadlinePassed(1), policy)
    assert (done.phase, done.lost, actions) == (Phase.AGGREGATING, people("c"), (Aggregate(people("a", "b")),))


@pytest.mark.parametrize("lost_first", [True, False])
def test_nobody_waits_for_a_revoked_client(lost_first: bool) -> None:
    policy = Policy(rounds=3, quorum=1.0)
    training = after(
        Round(0), ClientsChosen(people("a", "b", "c")), UpdateStored("a"), UpdateStored("b"), policy=policy
    )
    if lost_first:
        training = after(training, ClientLost("c"), policy=policy)
        assert training.phase is Phase.WAITING
    done, actions = step(training, ClientRevoked("c"), policy)
    assert (done.phase, actions) == (Phase.AGGREGATING, (Aggregate(people("a", "b")),))
    assert not done.takes_update_of("c")


def test_revoking_one_of_more_than_are_needed_lowers_no_bar() -> None:
    begun = after(Round(0), ClientsChosen(people("a", "b", "c"), wanted=2), UpdateStored("a"))
    left = after(begun, ClientRevoked("c"))
    assert (left.phase, left.wanted) == (Phase.TRAINING, 2)


def test_an_answer_after_two_deadlines_without_any_is_not_left_lying() -> None:
    policy = Policy(rounds=3, quorum=1.0)
    short = after(Round(0), ClientsChosen(people("a", "b")), DeadlinePassed(0), policy=policy)
    assert step(short, DeadlinePassed(1), policy) == (short, (Wait(),))  # the clock runs on
    answered = after(short, UpdateStored("a"), policy=policy)
    assert after(answered, DeadlinePassed(1), policy=policy).phase is Phase.AGGREGATING


def test_a_restart_keeps_the_clock_running_for_those_who_may_come_back() -> None:
    alone = after(Round(0), ClientsChosen(people("a", "b")), ClientLost("a"), ClientLost("b"))
    assert resume(alone, POLICY, frozenset()) == (alone, (Wait(),))


def test_a_stop_does_not_wait_for_ever_for_clients_that_hang() -> None:
    hanging = after(Round(1), ClientsChosen(people("a", "b")), StopRequested("enough"), DeadlinePassed(0))
    done, actions = step(hanging, DeadlinePassed(1), POLICY)
    assert (done.phase, done.asked) == (Phase.FINISHED, frozenset())
    assert actions == (Release(people("a", "b")), Finish("enough"))


def test_stop_finishes_the_round_under_way_first() -> None:
    assert after(Round(1), StopRequested("enough")).phase is Phase.FINISHED
    training = after(Round(1), ClientsChosen(people("a")), StopRequested("enough"))
    assert training.phase is Phase.TRAINING
    assert after(training, UpdateStored("a"), ModelStored(2)).phase is Phase.FINISHED


def test_a_stop_whose_clients_all_left_ends_the_federation() -> None:
    training = after(Round(1), ClientsChosen(people("a", "b")), StopRequested("enough"))
    gone, actions = step(after(training, ClientLost("a")), ClientLost("b"), POLICY)
    assert (gone.phase, actions) == (Phase.FINISHED, (Finish("enough"),))


def test_impossible_events_are_bugs() -> None:
    with pytest.raises(IllegalEvent, match="waiting"):
        step(Round(0), ModelStored(1), POLICY)
    with pytest.raises(IllegalEvent):
        step(after(Round(0), ClientsChosen(people("a"))), ClientsChosen(people("b")), POLICY)
    with pytest.raises(IllegalEvent):
        step(Round(0, Phase.AGGREGATING, received=people("a")), ModelStored(7), POLICY)


def test_a_finished_federation_goes_on_when_more_rounds_are_wanted() -> None:
    finished = Round(3, Phase.FINISHED, stopping=ALL_ROUNDS_DONE)
    assert resume(finished, POLICY, frozenset())[0].phase is Phase.FINISHED
    assert resume(finished, Policy(rounds=5), frozenset())[0].phase is Phase.WAITING
    stopped = replace(finished, stopping="stopped by an operator")
    assert resume(stopped, Policy(rounds=5), frozenset())[0].phase is Phase.FINISHED


def test_updates_that_were_only_in_memory_are_asked_for_again() -> None:
    aggregating = Round(0, Phase.AGGREGATING, wanted=2, received=people("a", "b"))
    round, actions = resume(aggregating, POLICY, people("a"))
    assert (round.phase, round.received, actions) == (Phase.TRAINING, people("a"), (Train(people("b")),))


def proposed(*clients: str) -> Round:
    aggregating = Round(0, Phase.AGGREGATING, wanted=3, received=people("a", "b", "c"))
    return after(aggregating, StepProposed(people(*clients)))


def test_a_step_is_tried_by_participants_and_taken_when_all_have_answered() -> None:
    aggregating = Round(0, Phase.AGGREGATING, wanted=2, received=people("a", "b"))
    verifying, actions = step(aggregating, StepProposed(people("a", "b")), POLICY)
    assert (verifying.phase, actions) == (Phase.VERIFYING, (Verify(people("a", "b")),))
    one = after(verifying, StepTried("a"))
    assert (one.phase, one.asked) == (Phase.VERIFYING, people("b"))
    done, actions = step(one, StepTried("b"), POLICY)
    assert (done.phase, actions) == (Phase.COMMITTING, (Commit(),))
    assert after(done, ModelStored(1)).number == 1


def test_a_step_that_nobody_can_try_is_decided_at_once() -> None:
    aggregating = Round(0, Phase.AGGREGATING, received=people("a"))
    done, actions = step(aggregating, StepProposed(people()), POLICY)
    assert (done.phase, actions) == (Phase.COMMITTING, (Commit(),))


def test_a_verification_waits_neither_for_the_lost_nor_past_its_deadline() -> None:
    left = after(proposed("a", "b", "c"), ClientLost("a"), ClientRevoked("b"))
    assert (left.phase, left.asked) == (Phase.VERIFYING, people("c"))
    done, actions = step(left, DeadlinePassed(0), POLICY)
    assert (done.phase, actions) == (Phase.COMMITTING, (Release(people("c")), Commit()))
    assert step(done, StepTried("c"), POLICY) == (done, ())  # too late to be of use
    assert done.received == people("a", "b", "c")  # whoever falls silent now has given an update all the same


def test_only_participants_can_be_asked_to_try_a_step() -> None:
    with pytest.raises(IllegalEvent):
        proposed("d")


@pytest.mark.parametrize("answered", [False, True])
def test_after_a_restart_the_step_is_made_again(answered: bool) -> None:
    verifying = after(proposed("a"), StepTried("a")) if answered else proposed("a")
    round, actions = resume(verifying, POLICY, people("a", "b", "c"))
    assert (round.phase, round.asked) == (Phase.AGGREGATING, people())
    assert actions == (Aggregate(people("a", "b", "c")),)
    lost, actions = resume(verifying, POLICY, people("a", "b"))
    assert (lost.phase, actions) == (Phase.TRAINING, (Train(people("c")),))


class Federation(RuleBasedStateMachine):
    """A coordinator in miniature: it journals like the real one, and crashes whenever it likes.

    `disk` is what survives a crash: the stored round, the stored updates, and the committed versions
    with the clients and the model version that each was made of.
    """

    CLIENTS = tuple("abcdef")

    @initialize(
        quorum=st.sampled_from((0.1, 0.5, 0.8, 1.0)),
        every=st.sampled_from((0, 1, 2)),
        minimum=st.integers(1, 3),
        durable=st.booleans(),
        verified=st.booleans(),
    )
    def begin(self, quorum: float, every: int, minimum: int, durable: bool, verified: bool) -> None:
        self.policy = Policy(rounds=4, quorum=quorum, evaluate_every=every, minimum_clients=minimum)
        self.minimum, self.durable, self.verified = minimum, durable, verified
        self.committing = False
        self.revoked: set[str] = set()
        self.connected: set[str] = set()
        self.round = Round(0)
        self.disk = round_to_json(self.round)
        self.stored: set[tuple[int, str]] = set()  # (round, client) of updates on the disk
        self.memory: set[tuple[int, str]] = set()  # with durability per round: those that a crash loses
        self.commits: list[tuple[int, frozenset[str]]] = []
        self.aggregating: frozenset[str] | None = None
        self.timer: tuple[int, int] | None = None  # round and attempt of the deadline that is to come

    def apply(self, event: Event) -> None:
        event = event_from_json(event_to_json(event))
        before = self.round
        self.round, actions = step(before, event, self.policy)
        if isinstance(event, UpdateStored) and self.round != before:
            (self.stored if self.durable else self.memory).add((before.number, event.client))
        if not isinstance(event, UpdateStored) or self.durable:
            self.disk = round_to_json(self.round)
        self.act(actions)

    def act(self, actions: tuple[object, ...]) -> None:
        for action in actions:
            if isinstance(action, Aggregate):
                self.aggregating = action.clients
            if isinstance(action, Commit):
                self.committing = True
            if isinstance(action, Train | Evaluate | Verify | Wait):
                self.timer = (self.round.number, self.round.attempt)

    # ---- what clients, time and the machine do ---------------------------------------------------

    @rule(client=st.sampled_from(CLIENTS))
    def joins(self, client: str) -> None:
        self.connected |= {client} - self.revoked

    @precondition(lambda self: len(self.revoked) < 3)
    @rule(client=st.sampled_from(CLIENTS))
    def is_revoked(self, client: str) -> None:
        self.revoked.add(client)
        self.connected.discard(client)
        self.apply(ClientRevoked(client))

    @rule(client=st.sampled_from(CLIENTS))
    def leaves(self, client: str) -> None:
        self.connected.discard(client)
        if client in self.round.asked:
            self.apply(ClientLost(client))

    @precondition(lambda self: self.round.phase in (Phase.WAITING, Phase.EVALUATING) and not self.round.paused)
    @rule(data=st.data())
    def chooses(self, data: st.DataObject) -> None:
        if len(self.connected) < self.minimum:
            return
        if self.round.phase is Phase.EVALUATING:
            if not self.round.asked:
                self.apply(ClientsChosen(frozenset(self.connected)))
        elif candidates := sorted(self.connected - self.round.asked - self.round.received):
            self.apply(ClientsChosen(frozenset(data.draw(st.lists(st.sampled_from(candidates), min_size=1)))))

    @rule(client=st.sampled_from(CLIENTS))
    def uploads(self, client: str) -> None:
        if self.round.takes_update_of(client):
            self.apply(UpdateStored(client))

    @rule(client=st.sampled_from(CLIENTS))
    def evaluates(self, client: str) -> None:
        self.apply(Evaluated(client))

    @precondition(lambda self: self.timer is not None)
    @rule()
    def deadline(self) -> None:
        assert self.timer is not None
        (number, attempt), self.timer = self.timer, None
        if number == self.round.number:
            self.apply(DeadlinePassed(attempt))

    @rule()
    def a_deadline_of_an_attempt_that_is_over(self) -> None:
        self.apply(DeadlinePassed(self.round.attempt - 1))

    @rule()
    def is_to_stop(self) -> None:
        self.apply(StopRequested("enough"))

    @precondition(lambda self: self.verified and self.round.phase is Phase.AGGREGATING)
    @rule(data=st.data())
    def proposes_step(self, data: st.DataObject) -> None:
        able = data.draw(st.sets(st.sampled_from(sorted(self.round.received))))
        self.apply(StepProposed(frozenset(able)))

    @rule(client=st.sampled_from(CLIENTS))
    def tries_step(self, client: str) -> None:
        self.apply(StepTried(client))

    @precondition(lambda self: self.aggregating is not None and (self.committing or not self.verified))
    @rule()
    def commits_model(self) -> None:
        assert self.aggregating is not None
        number = self.round.number
        self.commits.append((number, self.aggregating))
        self.stored |= self.memory
        self.aggregating, self.committing = None, False
        self.apply(ModelStored(number + 1))

    @rule()
    def pauses(self) -> None:
        self.apply(Paused())

    @rule()
    def resumes(self) -> None:
        self.apply(Resumed())

    @rule()
    def crashes(self) -> None:
        self.memory.clear()
        self.connected.clear()
        self.aggregating = self.timer = None
        self.committing = False
        stored = frozenset(client for number, client in self.stored if number == round_from_json(self.disk).number)
        self.round, actions = resume(round_from_json(self.disk), self.policy, stored)
        self.act(actions)
        if self.round.phase is Phase.AGGREGATING:
            assert self.aggregating == self.round.received

    # ---- what must always hold -----------------------------------------------------------------

    @invariant()
    def no_round_is_committed_twice_and_none_is_left_out(self) -> None:
        assert [number for number, _ in self.commits] == list(range(len(self.commits)))
        assert self.round.number == len(self.commits)

    @invariant()
    def a_committed_round_consists_of_updates_for_that_very_round(self) -> None:
        for number, clients in self.commits:
            assert clients
            assert all((number, client) in self.stored for client in clients)

    @invariant()
    def every_stored_update_of_the_current_round_is_in_it(self) -> None:
        current = {client for number, client in self.stored | self.memory if number == self.round.number}
        if self.round.phase not in (Phase.EVALUATING, Phase.FINISHED):
            assert current == self.round.received

    @invariant()
    def nobody_is_asked_and_received_at_once(self) -> None:
        if self.round.phase is Phase.VERIFYING:
            assert self.round.asked <= self.round.received
            assert not self.round.lost & self.round.received
            return
        assert not self.round.asked & self.round.received
        assert not self.round.lost & (self.round.asked | self.round.received)

    @invariant()
    def updates_are_held_exactly_while_a_model_is_made_of_them(self) -> None:
        making = self.round.phase in (Phase.AGGREGATING, Phase.VERIFYING, Phase.COMMITTING)
        assert (self.aggregating is not None) == making
        assert self.aggregating is None or self.aggregating == self.round.received
        assert self.committing == (self.round.phase is Phase.COMMITTING)

    @invariant()
    def whoever_is_waited_for_is_waited_for_until_a_deadline(self) -> None:
        waits = self.round.received or self.round.asked or self.round.phase is Phase.EVALUATING
        if waits and self.round.phase not in (Phase.AGGREGATING, Phase.COMMITTING, Phase.FINISHED):
            assert self.timer == (self.round.number, self.round.attempt)

    def teardown(self) -> None:
        """While enough clients are alive and nothing goes wrong, the federation finishes: it is never stuck."""
        if not hasattr(self, "round"):
            return
        self.apply(Resumed())
        self.connected = set(sorted(set(self.CLIENTS) - self.revoked)[: self.minimum])
        for client in sorted(self.round.asked - self.connected):
            self.apply(ClientLost(client))
        for _ in range(100):
            if self.round.phase is Phase.FINISHED:
                return
            if self.round.phase is Phase.VERIFYING:
                self.apply(StepTried(min(self.round.asked)))
            elif self.verified and self.round.phase is Phase.AGGREGATING:
                self.apply(StepProposed(self.round.received))
            elif self.aggregating is not None:
                self.commits_model()
            elif self.round.phase is Phase.EVALUATING:
                for client in sorted(self.round.asked):
                    self.apply(Evaluated(client))
                if self.round.phase is Phase.EVALUATING:
                    self.apply(ClientsChosen(frozenset(self.connected)))
            elif self.round.asked:
                self.apply(UpdateStored(min(self.round.asked)))
            elif candidates := frozenset(self.connected) - self.round.received:
                self.apply(ClientsChosen(candidates))
            else:
                self.apply(DeadlinePassed(self.round.attempt))
        raise AssertionError(f"stuck: {self.round}")


Federation.TestCase.settings = settings(max_examples=300, stateful_step_count=60, deadline=None)
TestFederation = Federation.TestCase
