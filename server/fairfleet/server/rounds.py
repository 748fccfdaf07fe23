"""The life of a round, as a pure step: what it becomes after an event, and what must now be done.

No clock, randomness, disk or network is in here: their results arrive as events. Every event is
journaled, with the round that it led to, before its actions are carried out: after a crash the
server takes the stored round and only has to carry out the last actions again (`resume`).

docs/rounds.md has the diagram, which is made from `step`. A round that missed its quorum waits for more clients, but
not for ever: when the deadline passes again, the minimum
of clients that a round needs at all suffices.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, replace
from typing import Any

from fairfleet.common.errors import Bug

Clients = frozenset[str]
NOBODY: Clients = frozenset()
ALL_ROUNDS_DONE = "all rounds are done"


class Phase(enum.Enum):
    WAITING = "waiting"  # for enough clients, or for more of them
    TRAINING = "training"
    AGGREGATING = "aggregating"
    VERIFYING = "verifying"  # participants try the step that aggregation proposes
    COMMITTING = "committing"  # the step that they made the server choose
    EVALUATING = "evaluating"
    FINISHED = "finished"


@dataclass(frozen=True)
class Policy:
    rounds: int  # the federation ends after so many
    quorum: float = 0.8  # share of a round's clients whose updates suffice at the deadline
    tolerate_missing: int | None = None  # instead of the quorum: so many of the round's clients may be missing
    evaluate_every: int = 0  # rounds; the last model is evaluated too; 0: never
    minimum_clients: int = 1  # so many suffice when a missed quorum was waited for until another deadline

    def suffice(self, wanted: int) -> int:
        """How many updates do at the deadline."""
        if self.tolerate_missing is not None:
            return max(1, wanted - self.tolerate_missing)
        return max(1, math.ceil(self.quorum * wanted))

    def evaluation_due(self, version: int, last: bool) -> bool:
        return self.evaluate_every > 0 and (last or version % self.evaluate_every == 0)


@dataclass(frozen=True)
class Round:
    number: int  # also the version of the model it trains; while evaluating, of the model evaluated
    phase: Phase = Phase.WAITING
    attempt: int = 0
    wanted: int = 0  # how many updates the round set out for; more clients may have been asked
    asked: Clients = NOBODY  # owe an update, a trial of the step, or an evaluation
    received: Clients = NOBODY  # whose update is stored
    lost: Clients = NOBODY  # asked in this round, then gone
    late: Clients = NOBODY  # of those asked or lost: owed an update when a deadline passed
    paused: bool = False
    stopping: str = ""  # why the federation is to end after this round

    def enough(self, policy: Policy) -> bool:
        return len(self.received) >= policy.suffice(self.wanted)

    def takes_update_of(self, client: str) -> bool:
        """Whether an update of this client, computed on this round's model, would count."""
        known = client in self.asked or client in self.lost
        return self.phase in (Phase.WAITING, Phase.TRAINING) and known


# ---- what happens ------------------------------------------------------------------------------


@dataclass(frozen=True)
class ClientsChosen:
    """Clients to train, or to evaluate, by the phase that the choice was made in."""

    clients: Clients
    wanted: int = 0  # of their updates, the first so many are enough; 0: all


@dataclass(frozen=True)
class UpdateStored:
    client: str


@dataclass(frozen=True)
class Evaluated:
    client: str


@dataclass(frozen=True)
class ClientLost:
    """It left, its lease ended, or it said that it cannot do the task."""

    client: str


@dataclass(frozen=True)
class ClientRevoked:
    """It will never come back: nobody waits for it any more."""

    client: str


@dataclass(frozen=True)
class DeadlinePassed:
    attempt: int


@dataclass(frozen=True)
class StepProposed:
    """Aggregation is done, and these clients are to try its step before it is taken; perhaps nobody can, or need."""

    clients: Clients


@dataclass(frozen=True)
class StepTried:
    """By a client whose answer is stored; or it said that it cannot."""

    client: str


@dataclass(frozen=True)
class ModelStored:
    version: int


@dataclass(frozen=True)
class Paused:
    pass


@dataclass(frozen=True)
class Resumed:
    pass


@dataclass(frozen=True)
class StopRequested:
    reason: str


Event = (
    ClientsChosen
    | UpdateStored
    | Evaluated
    | ClientLost
    | ClientRevoked
    | DeadlinePassed
    | StepProposed
    | StepTried
    | ModelStored
    | Paused
    | Resumed
    | StopRequested
)
EVENTS: dict[str, type[Any]] = {kind.__name__: kind for kind in Event.__args__}

# ---- what must be done about it: safe to repeat ------------------------------------------------


@dataclass(frozen=True)
class Train:
    clients: Clients


@dataclass(frozen=True)
class Evaluate:
    clients: Clients


@dataclass(frozen=True)
class Wait:
    """For clients, until the deadline."""


@dataclass(frozen=True)
class Release:
    """Their results are no longer wanted."""

    clients: Clients


@dataclass(frozen=True)
class Aggregate:
    clients: Clients


@dataclass(frozen=True)
class Verify:
    clients: Clients


@dataclass(frozen=True)
class Commit:
    """The step that the answers speak for."""


@dataclass(frozen=True)
class Finish:
    reason: str


Action = Train | Evaluate | Wait | Release | Aggregate | Verify | Commit | Finish


class IllegalEvent(Bug):
    pass


def step(round: Round, event: Event, policy: Policy) -> tuple[Round, tuple[Action, ...]]:
    """What the round becomes, and what must now be done about it. Knows no IO."""
    match round.phase, event:
        case Phase.WAITING, ClientsChosen(clients, some) if clients and not clients & (round.asked | round.received):
            return _training(round, clients, some or len(clients)), (Train(clients),)
        case ((Phase.WAITING | Phase.TRAINING), UpdateStored(client)) if round.takes_update_of(client):
            taken = replace(
                round,
                asked=round.asked - {client},
                lost=round.lost - {client},
                late=round.late - {client},
                received=round.received | {client},
            )
            return _settle(taken, policy)
        case ((Phase.WAITING | Phase.TRAINING), ClientLost(client)) if client in round.asked:
            return _settle(replace(round, asked=round.asked - {client}, lost=round.lost | {client}), policy)
        case ((Phase.WAITING | Phase.TRAINING), ClientRevoked(client)) if client in round.asked | round.lost:
            left = replace(round, asked=round.asked - {client}, lost=round.lost - {client}, late=round.late - {client})
            able = len(left.asked | left.lost | left.received)  # more than are wanted may have been asked
            return _settle(replace(left, wanted=min(left.wanted, able)), policy)
        case Phase.TRAINING, DeadlinePassed(attempt) if attempt == round.attempt:
            late = _late(round)
            return _aggregate(late) if late.enough(policy) else _wait_for_more(late)
        case Phase.WAITING, DeadlinePassed(attempt) if attempt == round.attempt:
            return _waited_in_vain(_late(round), policy)
        case Phase.AGGREGATING, StepProposed(clients) if clients <= round.received:
            verifying = replace(round, phase=Phase.VERIFYING, asked=clients)
            return (verifying, (Verify(clients),)) if clients else _commit(verifying)
        case Phase.VERIFYING, (StepTried(client) | ClientLost(client) | ClientRevoked(client)) if client in round.asked:
            left = replace(round, asked=round.asked - {client})
            return (left, ()) if left.asked else _commit(left)
        case Phase.VERIFYING, DeadlinePassed(attempt) if attempt == round.attempt:
            return _commit(round)
        case ((Phase.AGGREGATING | Phase.COMMITTING), ModelStored(version)) if version == round.number + 1:
            return _after_commit(round, policy)
        case Phase.EVALUATING, ClientsChosen(clients) if not round.asked:
            chosen = replace(round, asked=clients)
            return (chosen, (Evaluate(clients),)) if clients else _after_evaluation(chosen, policy)
        case Phase.EVALUATING, (Evaluated(client) | ClientLost(client) | ClientRevoked(client)) if (
            client in round.asked
        ):
            left = replace(round, asked=round.asked - {client})
            return (left, ()) if left.asked else _after_evaluation(left, policy)
        case Phase.EVALUATING, DeadlinePassed(attempt) if attempt == round.attempt:
            after, actions = _after_evaluation(replace(round, asked=NOBODY), policy)
            return after, (*_released(round), *actions)
        case Phase.FINISHED, (Paused() | Resumed() | StopRequested()):
            return round, ()
        case _, Paused():
            return replace(round, paused=True), ()
        case _, Resumed():
            return replace(round, paused=False), ()
        case ((Phase.WAITING | Phase.EVALUATING), StopRequested(reason)) if not round.asked and not round.received:
            return _finished(round, reason)
        case _, StopRequested(reason):
            return replace(round, stopping=reason), ()
        case _, (UpdateStored(client) | ClientLost(client) | ClientRevoked(client)) if client not in round.asked:
            return round, ()  # a repetition, or somebody this round does not wait for
        case _, (DeadlinePassed() | StepTried() | Evaluated()):
            return round, ()  # of an attempt, a verification or an evaluation that is over
    raise IllegalEvent(f"round {round.number} is {round.phase.value} and cannot take {event!r}")


def _training(round: Round, clients: Clients, some: int) -> Round:
    wanted = max(round.wanted, some + len(round.received))
    asked, lost, late = round.asked | clients, round.lost - clients, round.late - clients
    return replace(round, phase=Phase.TRAINING, asked=asked, lost=lost, late=late, wanted=wanted)


def _late(round: Round) -> Round:
    return replace(round, late=round.late | round.asked)


def _settle(round: Round, policy: Policy) -> tuple[Round, tuple[Action, ...]]:
    """Goes on when nobody is waited for any more: enough have answered, all have, or the deadline passed."""
    if round.phase is Phase.TRAINING and round.asked and len(round.received) < round.wanted:
        return round, ()
    if round.enough(policy):
        return _aggregate(round)
    if round.stopping and not round.asked and not round.received:
        return _finished(round, round.stopping)  # there is nothing to finish first
    return _wait_for_more(round) if round.phase is Phase.TRAINING else (round, ())


def _aggregate(round: Round) -> tuple[Round, tuple[Action, ...]]:
    done = replace(round, phase=Phase.AGGREGATING, asked=NOBODY, lost=round.lost | round.asked)
    return done, (*_released(round), Aggregate(done.received))


def _commit(round: Round) -> tuple[Round, tuple[Action, ...]]:
    return replace(round, phase=Phase.COMMITTING, asked=NOBODY), (*_released(round), Commit())


def _wait_for_more(round: Round) -> tuple[Round, tuple[Action, ...]]:
    return replace(round, phase=Phase.WAITING, attempt=round.attempt + 1), (Wait(),)


def _waited_in_vain(round: Round, policy: Policy) -> tuple[Round, tuple[Action, ...]]:
    """For more clients. The clock runs on also while nobody has answered: whoever answers next may be the last."""
    if round.received and (round.stopping or len(round.received) >= policy.minimum_clients):
        return _aggregate(round)
    if round.stopping:
        done, actions = _finished(replace(round, asked=NOBODY), round.stopping)
        return done, (*_released(round), *actions)
    return round, (Wait(),)


def _released(round: Round) -> tuple[Action, ...]:
    return (Release(round.asked),) if round.asked else ()


def _after_commit(round: Round, policy: Policy) -> tuple[Round, tuple[Action, ...]]:
    version = round.number + 1
    last = version >= policy.rounds or bool(round.stopping)
    if policy.evaluation_due(version, last):
        return Round(version, Phase.EVALUATING, paused=round.paused, stopping=round.stopping), (Wait(),)
    return _next(Round(version, paused=round.paused, stopping=round.stopping), policy)


def _after_evaluation(round: Round, policy: Policy) -> tuple[Round, tuple[Action, ...]]:
    return _next(replace(round, phase=Phase.WAITING, attempt=0), policy)


def _next(round: Round, policy: Policy) -> tuple[Round, tuple[Action, ...]]:
    if round.stopping:
        return _finished(round, round.stopping)
    if round.number >= policy.rounds:
        return _finished(round, ALL_ROUNDS_DONE)
    return round, ()


def _finished(round: Round, reason: str) -> tuple[Round, tuple[Action, ...]]:
    return replace(round, phase=Phase.FINISHED, stopping=reason), (Finish(reason),)


def resume(round: Round, policy: Policy, stored: Clients) -> tuple[Round, tuple[Action, ...]]:
    """What a server that just started, perhaps with another policy, must do for the stored round to go on.

    `stored` are the clients whose updates are on the disk: with durability per round, those that
    were only in memory are asked for again.
    """
    if round.phase in (Phase.VERIFYING, Phase.COMMITTING):  # the step is made again; answers to it are on the disk
        round = replace(round, phase=Phase.AGGREGATING, asked=NOBODY)
    if gone := round.received - stored:
        phase = Phase.TRAINING if round.phase is Phase.AGGREGATING else round.phase
        round = replace(round, phase=phase, received=round.received & stored, asked=round.asked | gone)
    match round.phase:
        case Phase.FINISHED if round.number < policy.rounds and round.stopping == ALL_ROUNDS_DONE:
            return replace(round, phase=Phase.WAITING, stopping=""), ()  # more rounds are wanted now
        case Phase.FINISHED:
            return round, (Finish(round.stopping),)
        case Phase.AGGREGATING:
            return round, (Aggregate(round.received),)
        case Phase.EVALUATING if round.asked:
            return round, (Evaluate(round.asked),)
        case Phase.TRAINING | Phase.WAITING if round.asked:
            return round, (Train(round.asked),)
        case Phase.WAITING if round.received and round.enough(policy):
            return _aggregate(round)
        case Phase.WAITING if round.received:
            return round, (Wait(),)
        case Phase.EVALUATING:
            return round, (Wait(),)
        case Phase.WAITING:
            after, actions = _next(round, policy)
            return after, actions or ((Wait(),) if round.attempt else ())
    return round, ()
