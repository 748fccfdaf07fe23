"""Random sequences of events, with crashes, keep the invariants of a round."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from fairfleet.server.rounds.serialization import (
    event_from_json,
    event_to_json,
    round_from_json,
    round_to_json,
)
from fairfleet.server.rounds.state_machine import (
    Aggregate,
    ClientLost,
    ClientRetired,
    ClientRevoked,
    ClientsChosen,
    Commit,
    DeadlinePassed,
    Evaluate,
    Evaluated,
    Event,
    ModelStored,
    Paused,
    Phase,
    Policy,
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


class Federation(RuleBasedStateMachine):
    """A miniature coordinator that stores events like the real one, and may crash at any time.

    `disk`, `stored` and `commits` survive a crash: the stored round, the stored updates, and the
    committed rounds with their clients.
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
        """Start a federation with a random policy."""
        self.policy = Policy(rounds=4, quorum=quorum, evaluate_every=every, minimum_clients=minimum)
        self.minimum, self.durable, self.verified = minimum, durable, verified
        self.committing = False
        self.revoked: set[str] = set()
        self.connected: set[str] = set()
        self.round = Round(0)
        self.disk = round_to_json(self.round)
        self.stored: set[tuple[int, str]] = set()  # (round, client) of updates on the disk
        # With durability per round, updates that a crash loses.
        self.memory: set[tuple[int, str]] = set()
        self.commits: list[tuple[int, frozenset[str]]] = []
        self.aggregating: frozenset[str] | None = None
        self.timer: tuple[int, int] | None = None  # round and attempt of the next deadline

    def apply(self, event: Event) -> None:
        """Store an event and perform its actions."""
        event = event_from_json(event_to_json(event))
        before = self.round
        self.round, actions = step(before, event, self.policy)
        if isinstance(event, UpdateStored) and self.round != before:
            (self.stored if self.durable else self.memory).add((before.number, event.client))
        if not isinstance(event, UpdateStored) or self.durable:
            self.disk = round_to_json(self.round)
        self.act(actions)

    def act(self, actions: tuple[object, ...]) -> None:
        """Perform actions."""
        for action in actions:
            if isinstance(action, Aggregate):
                self.aggregating = action.clients
            if isinstance(action, Commit):
                self.committing = True
            if isinstance(action, Train | Evaluate | Verify | Wait):
                self.timer = (self.round.number, self.round.attempt)

    # ---- events --------------------------------------------------------------------------------

    @rule(client=st.sampled_from(CLIENTS))
    def client_joins(self, client: str) -> None:
        """A client connects."""
        self.connected |= {client} - self.revoked

    @precondition(lambda self: len(self.revoked) < 3)
    @rule(client=st.sampled_from(CLIENTS))
    def client_is_revoked(self, client: str) -> None:
        """A client is revoked."""
        self.revoked.add(client)
        self.connected.discard(client)
        if self.round.phase in (Phase.WAITING, Phase.TRAINING):
            self.stored.discard((self.round.number, client))
            self.memory.discard((self.round.number, client))
        self.apply(ClientRevoked(client))

    @rule(client=st.sampled_from(CLIENTS))
    def client_retires(self, client: str) -> None:
        """A client's owner lets it take part no more."""
        self.connected.discard(client)
        self.apply(ClientRetired(client))

    @rule(client=st.sampled_from(CLIENTS))
    def client_leaves(self, client: str) -> None:
        """A client disconnects."""
        self.connected.discard(client)
        if client in self.round.asked:
            self.apply(ClientLost(client))

    @rule(client=st.sampled_from(CLIENTS))
    def client_gives_up(self, client: str) -> None:
        """A client reports that its task failed."""
        if client in self.round.asked:
            self.apply(ClientLost(client, gave_up=True))

    @precondition(
        lambda self: self.round.phase in (Phase.WAITING, Phase.EVALUATING) and not self.round.paused
    )
    @rule(data=st.data())
    def server_selects(self, data: st.DataObject) -> None:
        """The server selects clients."""
        if len(self.connected) < self.minimum:
            return
        if self.round.phase is Phase.EVALUATING:
            if not self.round.asked:
                self.apply(ClientsChosen(frozenset(self.connected)))
        elif candidates := sorted(self.connected - self.round.unavailable()):
            self.apply(
                ClientsChosen(
                    frozenset(data.draw(st.lists(st.sampled_from(candidates), min_size=1)))
                )
            )

    @rule(client=st.sampled_from(CLIENTS))
    def client_uploads(self, client: str) -> None:
        """A client delivers its update."""
        if self.round.takes_update_of(client):
            self.apply(UpdateStored(client))

    @rule(client=st.sampled_from(CLIENTS))
    def client_evaluates(self, client: str) -> None:
        """A client reports an evaluation."""
        self.apply(Evaluated(client))

    @precondition(lambda self: self.timer is not None)
    @rule()
    def deadline_passes(self) -> None:
        """The current deadline passes."""
        assert self.timer is not None
        (number, attempt), self.timer = self.timer, None
        if number == self.round.number:
            self.apply(DeadlinePassed(attempt))

    @rule()
    def outdated_deadline_passes(self) -> None:
        """The deadline of an earlier attempt passes."""
        self.apply(DeadlinePassed(self.round.attempt - 1))

    @rule()
    def stop_is_requested(self) -> None:
        """An operator requests a stop."""
        self.apply(StopRequested("enough"))

    @precondition(lambda self: self.verified and self.round.phase is Phase.AGGREGATING)
    @rule(data=st.data())
    def server_proposes_step(self, data: st.DataObject) -> None:
        """Aggregation ends with a step to verify."""
        able = data.draw(st.sets(st.sampled_from(sorted(self.round.received))))
        self.apply(StepProposed(frozenset(able)))

    @rule(client=st.sampled_from(CLIENTS))
    def client_tries_step(self, client: str) -> None:
        """A client reports its trial of the step."""
        self.apply(StepTried(client))

    @precondition(
        lambda self: self.aggregating is not None and (self.committing or not self.verified)
    )
    @rule()
    def server_commits_model(self) -> None:
        """The server stores the new model."""
        assert self.aggregating is not None
        number = self.round.number
        self.commits.append((number, self.aggregating))
        self.stored |= self.memory
        self.aggregating, self.committing = None, False
        self.apply(ModelStored(number + 1))

    @rule()
    def operator_pauses(self) -> None:
        """An operator pauses the federation."""
        self.apply(Paused())

    @rule()
    def operator_resumes(self) -> None:
        """An operator resumes the federation."""
        self.apply(Resumed())

    @rule()
    def server_crashes(self) -> None:
        """The server crashes and restarts."""
        self.memory.clear()
        self.connected.clear()
        self.aggregating = self.timer = None
        self.committing = False
        stored = frozenset(
            client for number, client in self.stored if number == round_from_json(self.disk).number
        )
        self.round, actions = resume(round_from_json(self.disk), self.policy, stored)
        self.act(actions)
        if self.round.phase is Phase.AGGREGATING:
            assert self.aggregating == self.round.received

    # ---- invariants ----------------------------------------------------------------------------

    @invariant()
    def every_round_is_committed_once(self) -> None:
        """No round is committed twice, and none is left out."""
        assert [number for number, _ in self.commits] == list(range(len(self.commits)))
        assert self.round.number == len(self.commits)

    @invariant()
    def a_committed_round_uses_its_own_updates(self) -> None:
        """Committed rounds consist of stored updates for that round."""
        for number, clients in self.commits:
            assert clients
            assert all((number, client) in self.stored for client in clients)

    @invariant()
    def every_stored_update_counts(self) -> None:
        """The current round has received exactly its stored updates."""
        current = {
            client for number, client in self.stored | self.memory if number == self.round.number
        }
        if self.round.phase not in (Phase.EVALUATING, Phase.FINISHED):
            assert current == self.round.received

    @invariant()
    def no_client_owes_and_delivered(self) -> None:
        """No client is in two of asked, received and lost."""
        if self.round.phase is Phase.VERIFYING:
            assert self.round.asked <= self.round.received
            assert not self.round.lost & self.round.received
            return
        assert not self.round.asked & self.round.received
        assert not self.round.lost & (self.round.asked | self.round.received)

    @invariant()
    def clients_that_gave_up_are_lost(self) -> None:
        """Clients that gave up are lost and not selected."""
        assert self.round.gave_up <= self.round.lost
        if self.round.phase in (Phase.WAITING, Phase.TRAINING):
            assert not self.round.gave_up & (self.round.asked | self.round.received)

    @invariant()
    def surplus_clients_are_lost_and_not_late(self) -> None:
        """Surplus clients are lost and were not late."""
        assert self.round.surplus <= self.round.lost - self.round.late

    @invariant()
    def aggregation_runs_in_its_phases_only(self) -> None:
        """Aggregation and commit run exactly in their phases."""
        making = self.round.phase in (Phase.AGGREGATING, Phase.VERIFYING, Phase.COMMITTING)
        assert (self.aggregating is not None) == making
        assert self.aggregating is None or self.aggregating == self.round.received
        assert self.committing == (self.round.phase is Phase.COMMITTING)

    @invariant()
    def every_wait_has_a_deadline(self) -> None:
        """The round never waits for clients without a deadline."""
        waits = self.round.received or self.round.asked or self.round.phase is Phase.EVALUATING
        if waits and self.round.phase not in (Phase.AGGREGATING, Phase.COMMITTING, Phase.FINISHED):
            assert self.timer == (self.round.number, self.round.attempt)

    def teardown(self) -> None:
        """Check that the federation finishes while enough clients work: it is never stuck."""
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
                self.server_commits_model()
            elif self.round.phase is Phase.EVALUATING:
                for client in sorted(self.round.asked):
                    self.apply(Evaluated(client))
                if self.round.phase is Phase.EVALUATING:
                    self.apply(ClientsChosen(frozenset(self.connected)))
            elif self.round.asked:
                self.apply(UpdateStored(min(self.round.asked)))
            elif candidates := frozenset(self.connected) - self.round.unavailable():
                self.apply(ClientsChosen(candidates))
            else:
                self.apply(DeadlinePassed(self.round.attempt))
        raise AssertionError(f"stuck: {self.round}")


Federation.TestCase.settings = settings(max_examples=300, stateful_step_count=60, deadline=None)
TestFederation = Federation.TestCase
