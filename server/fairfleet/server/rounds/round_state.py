"""The state of a round, and the policy that says when it has enough updates.

`rounds.state_machine` moves a round from state to state. Rounds are stored in the database by
`rounds.serialization`, so the names of fields and the values of phases must not change.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, replace

Clients = frozenset[str]
NOBODY: Clients = frozenset()


class Phase(enum.Enum):
    """What a round is doing."""

    WAITING = "waiting"  # for enough clients, or for more of them
    TRAINING = "training"
    AGGREGATING = "aggregating"
    VERIFYING = "verifying"  # participants try the step that aggregation proposes
    COMMITTING = "committing"  # the step that the server chose from their answers
    EVALUATING = "evaluating"
    FINISHED = "finished"


@dataclass(frozen=True)
class Policy:
    """When a round has enough updates, and when the federation evaluates and ends."""

    rounds: int  # the federation ends after so many
    quorum: float = 0.8  # share of a round's clients whose updates suffice at the deadline
    # Replaces the quorum: so many of the round's clients may be missing.
    tolerate_missing: int | None = None
    evaluate_every: int = 0  # rounds; the last model is evaluated too; 0: never
    # So many updates suffice when another deadline has passed after a missed quorum.
    minimum_clients: int = 1

    def suffice(self, wanted_updates: int) -> int:
        """Return how many of the wanted updates suffice at the deadline."""
        if self.tolerate_missing is not None:
            return max(1, wanted_updates - self.tolerate_missing)
        return max(1, math.ceil(self.quorum * wanted_updates))

    def evaluation_due(self, version: int, last: bool) -> bool:
        """Return whether this version of the model, perhaps the last, is to be evaluated."""
        return self.evaluate_every > 0 and (last or version % self.evaluate_every == 0)


@dataclass(frozen=True)
class Round:
    """One round: its phase, and what each of its clients has done so far."""

    # Also the version of the model that the round trains; while evaluating, of the model evaluated.
    number: int
    phase: Phase = Phase.WAITING
    attempt: int = 0
    wanted: int = 0  # updates that the round aims for; more clients may have been selected
    asked: Clients = NOBODY  # owe an update, a trial of the step, or an evaluation
    received: Clients = NOBODY  # whose update is stored
    lost: Clients = NOBODY  # selected in this round, then gone
    late: Clients = NOBODY  # selected or lost, and owed an update when a deadline passed
    retried: Clients = NOBODY  # selected a second time in this round, after they were lost
    gave_up: Clients = NOBODY  # lost, and not selected again in this round
    # Lost, because enough others delivered before they did and before any deadline.
    surplus: Clients = NOBODY
    deadlines_missed: int = 0  # deadlines that passed in training without a quorum
    paused: bool = False
    stopping: str = ""  # why the federation is to end after this round

    def enough(self, policy: Policy) -> bool:
        """Return whether the updates received suffice at the deadline."""
        return len(self.received) >= policy.suffice(self.wanted)

    def unavailable(self) -> Clients:
        """Return the clients that cannot be selected to train now."""
        return self.asked | self.received | self.gave_up

    def concerns(self, client: str) -> bool:
        """Return whether the client was selected to train in this round, with any outcome."""
        return client in self.asked | self.received | self.lost

    def without(self, client: str) -> Round:
        """Return the round with a client removed from all sets but `retried`."""
        return replace(
            self,
            asked=self.asked - {client},
            received=self.received - {client},
            lost=self.lost - {client},
            late=self.late - {client},
            gave_up=self.gave_up - {client},
            surplus=self.surplus - {client},
        )

    def without_for_good(self, client: str) -> Round:
        """Return the round without a client that never comes back; it need not be replaced."""
        remaining = self.without(client)
        # More clients than the wanted number may have been selected.
        able = len(remaining.asked | remaining.lost | remaining.received)
        return replace(remaining, wanted=min(remaining.wanted, able))

    def takes_update_of(self, client: str) -> bool:
        """Return whether an update of this client, computed on this round's model, would count."""
        was_selected = client in self.asked or client in self.lost
        return self.phase in (Phase.WAITING, Phase.TRAINING) and was_selected
