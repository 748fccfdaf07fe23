"""The life of a round as a pure function: the next state and the actions to perform.

It uses no clock, randomness, disk or network: their results arrive as events. Every event is
stored, with the round that it led to, before its actions are performed. After a crash the server
loads the stored round and only repeats the last actions (`resume`).

docs/explanation/rounds.md has the diagram, which is generated from `step`. A round that missed its
quorum waits for more clients, but only until the deadline passes again: then the minimum that any
round needs suffices. No client can delay that: one that gives up its training, or is lost twice, is
not selected again in the round.
"""

from __future__ import annotations

from dataclasses import replace

from fairfleet.common.errors import Bug
from fairfleet.server.rounds.events import (
    EVENTS,
    Action,
    Aggregate,
    ClientLost,
    ClientRetired,
    ClientRevoked,
    ClientsChosen,
    Commit,
    Continued,
    DeadlinePassed,
    Evaluate,
    Evaluated,
    Event,
    Finish,
    ModelStored,
    Paused,
    Release,
    Resumed,
    StepProposed,
    StepTried,
    StopRequested,
    Train,
    UpdateStored,
    Verify,
    Wait,
)
from fairfleet.server.rounds.round_state import NOBODY, Clients, Phase, Policy, Round

__all__ = [
    "ALL_ROUNDS_DONE",
    "EVENTS",
    "NOBODY",
    "Action",
    "Aggregate",
    "ClientLost",
    "ClientRetired",
    "ClientRevoked",
    "Clients",
    "ClientsChosen",
    "Commit",
    "Continued",
    "DeadlinePassed",
    "Evaluate",
    "Evaluated",
    "Event",
    "Finish",
    "IllegalEvent",
    "ModelStored",
    "Paused",
    "Phase",
    "Policy",
    "Release",
    "Resumed",
    "Round",
    "StepProposed",
    "StepTried",
    "StopRequested",
    "Train",
    "UpdateStored",
    "Verify",
    "Wait",
    "resume",
    "step",
]

ALL_ROUNDS_DONE = "all rounds are done"

Transition = tuple[Round, tuple[Action, ...]]


class IllegalEvent(Bug):
    """An event that cannot happen in the phase of its round."""


def step(round_: Round, event: Event, policy: Policy) -> Transition:
    """Return the next state and the actions to perform. No IO, no clock, no randomness.

    Raises IllegalEvent if the event cannot happen in this phase.
    """
    match round_.phase:
        case _ if isinstance(event, Paused | Resumed | StopRequested | Continued):
            return _controlled(round_, event)
        case Phase.WAITING | Phase.TRAINING:
            transition = _step_collecting(round_, event, policy)
        case Phase.AGGREGATING | Phase.COMMITTING:
            transition = _step_aggregating(round_, event, policy)
        case Phase.VERIFYING:
            transition = _step_verifying(round_, event)
        case Phase.EVALUATING:
            transition = _step_evaluating(round_, event, policy)
        case _:
            transition = None
    return _ignored(round_, event) if transition is None else transition


# ---- one function per phase; None: the event does not concern the phase ------------------------


def _controlled(round_: Round, event: Paused | Resumed | StopRequested | Continued) -> Transition:
    """Apply a request of an operator, or of the federation's stop conditions."""
    match round_.phase, event:
        case Phase.FINISHED, Continued(version, source) if version == round_.number + (
            source is not None
        ):
            # Clients that were selected before the end get tasks with other names.
            attempt = round_.attempt + 1 if round_.wanted and source is None else 0
            return Round(version, attempt=attempt, paused=round_.paused), ()
        case Phase.FINISHED, _:
            return round_, ()
        case _, Continued():
            return replace(round_, stopping=""), ()
        case _, Paused():
            return replace(round_, paused=True), ()
        case _, Resumed():
            return replace(round_, paused=False), ()
        case ((Phase.WAITING | Phase.EVALUATING), StopRequested(reason)) if (
            not round_.asked and not round_.received
        ):
            return _finished(round_, reason)
        case _, StopRequested(reason):
            return replace(round_, stopping=reason), ()


def _step_collecting(round_: Round, event: Event, policy: Policy) -> Transition | None:
    """Handle an event while the round waits for clients or for their updates."""
    match round_.phase, event:
        case Phase.WAITING, ClientsChosen(clients, enough) if (
            clients and not clients & round_.unavailable()
        ):
            return _training(round_, clients, enough or len(clients)), (Train(clients),)
        case _, UpdateStored(client) if round_.takes_update_of(client):
            without = round_.without(client)
            return _settle(replace(without, received=without.received | {client}), policy)
        case _, ClientRetired(client) if client in round_.asked:
            return _settle(round_.without_for_good(client), policy)
        case _, ClientLost(client, gave_up) if client in round_.asked:
            return _settle(_lost(round_, client, gave_up or client in round_.retried), policy)
        case _, ClientRevoked(client) if round_.concerns(client):
            return _settle(round_.without_for_good(client), policy)
        case Phase.TRAINING, DeadlinePassed(attempt) if attempt == round_.attempt:
            return _deadline_in_training(_late(round_), policy)
        case Phase.WAITING, DeadlinePassed(attempt) if attempt == round_.attempt:
            return _deadline_in_waiting(_late(round_), policy)
    return None


def _step_aggregating(round_: Round, event: Event, policy: Policy) -> Transition | None:
    """Handle an event while the model is computed or committed."""
    match round_.phase, event:
        case Phase.AGGREGATING, StepProposed(clients) if clients <= round_.received:
            verifying = replace(round_, phase=Phase.VERIFYING, asked=clients)
            return (verifying, (Verify(clients),)) if clients else _commit(verifying)
        case _, ModelStored(version) if version == round_.number + 1:
            return _after_commit(round_, policy)
    return None


def _step_verifying(round_: Round, event: Event) -> Transition | None:
    """Handle an event while clients try the proposed step."""
    match event:
        case StepTried(client) | ClientLost(client) | ClientRevoked(client) if (
            client in round_.asked
        ):
            remaining = replace(round_, asked=round_.asked - {client})
            return (remaining, ()) if remaining.asked else _commit(remaining)
        case DeadlinePassed(attempt) if attempt == round_.attempt:
            return _commit(round_)
    return None


def _step_evaluating(round_: Round, event: Event, policy: Policy) -> Transition | None:
    """Handle an event while clients evaluate a model."""
    match event:
        case ClientsChosen(clients) if not round_.asked:
            chosen = replace(round_, asked=clients)
            return (chosen, (Evaluate(clients),)) if clients else _after_evaluation(chosen, policy)
        case Evaluated(client) | ClientLost(client) | ClientRevoked(client) if (
            client in round_.asked
        ):
            remaining = replace(round_, asked=round_.asked - {client})
            return (remaining, ()) if remaining.asked else _after_evaluation(remaining, policy)
        case DeadlinePassed(attempt) if attempt == round_.attempt:
            after, actions = _after_evaluation(replace(round_, asked=NOBODY), policy)
            return after, (*_released(round_), *actions)
    return None


def _ignored(round_: Round, event: Event) -> Transition:
    """Return the round as it is if the event is harmless; raise IllegalEvent otherwise."""
    match event:
        case UpdateStored(client) | ClientLost(client) | ClientRevoked(client) if (
            client not in round_.asked
        ):
            return round_, ()  # a repetition, or a client that this round does not wait for
        case DeadlinePassed() | StepTried() | Evaluated():
            return round_, ()  # of an attempt, a verification or an evaluation that is over
    raise IllegalEvent(f"round {round_.number} is {round_.phase.value} and cannot take {event!r}")


# ---- collecting updates ------------------------------------------------------------------------


def _training(round_: Round, clients: Clients, enough: int) -> Round:
    """Return the round in training with these clients, of whose updates so many are enough."""
    return replace(
        round_,
        phase=Phase.TRAINING,
        asked=round_.asked | clients,
        lost=round_.lost - clients,
        late=round_.late - clients,
        surplus=round_.surplus - clients,
        wanted=max(round_.wanted, enough + len(round_.received)),
        retried=round_.retried | (round_.lost & clients),
    )


def _lost(round_: Round, client: str, for_good: bool) -> Round:
    """Return the round after it lost a client, perhaps for good; its update would still count."""
    gave_up = round_.gave_up | {client} if for_good else round_.gave_up
    return replace(
        round_, asked=round_.asked - {client}, lost=round_.lost | {client}, gave_up=gave_up
    )


def _late(round_: Round) -> Round:
    return replace(round_, late=round_.late | round_.asked)


def _settle(round_: Round, policy: Policy) -> Transition:
    """Continue if enough clients or all have answered, or the deadline has passed."""
    if round_.phase is Phase.TRAINING and round_.asked and len(round_.received) < round_.wanted:
        return round_, ()
    if round_.enough(policy):
        return _aggregate(round_)
    if round_.stopping and not round_.asked and not round_.received:
        return _finished(round_, round_.stopping)  # there is nothing to complete first
    return _wait_for_more(round_) if round_.phase is Phase.TRAINING else (round_, ())


def _wait_for_more(round_: Round) -> Transition:
    return replace(round_, phase=Phase.WAITING, attempt=round_.attempt + 1), (Wait(),)


def _deadline_in_training(round_: Round, policy: Policy) -> Transition:
    """Apply the quorum, and at a later deadline the minimum.

    Selecting other clients meanwhile does not delay the second deadline.
    """
    if round_.enough(policy) or (round_.deadlines_missed and _minimum_suffices(round_, policy)):
        return _aggregate(round_)
    return _wait_for_more(replace(round_, deadlines_missed=round_.deadlines_missed + 1))


def _deadline_in_waiting(round_: Round, policy: Policy) -> Transition:
    """End the wait for more clients.

    The clock also runs while no client has answered: the next answer may be the last.
    """
    if _minimum_suffices(round_, policy):
        return _aggregate(round_)
    if round_.stopping:
        finished, actions = _finished(replace(round_, asked=NOBODY), round_.stopping)
        return finished, (*_released(round_), *actions)
    # Too few clients have answered for any model. Those that gave up are the only ones left, and
    # get another chance per deadline.
    return replace(round_, gave_up=NOBODY, retried=NOBODY), (Wait(),)


def _minimum_suffices(round_: Round, policy: Policy) -> bool:
    return bool(round_.received) and (
        bool(round_.stopping) or len(round_.received) >= policy.minimum_clients
    )


# ---- from aggregation to the next round --------------------------------------------------------


def _aggregate(round_: Round) -> Transition:
    lost, surplus = round_.lost | round_.asked, round_.surplus | (round_.asked - round_.late)
    complete = replace(round_, phase=Phase.AGGREGATING, asked=NOBODY, lost=lost, surplus=surplus)
    return complete, (*_released(round_), Aggregate(complete.received))


def _commit(round_: Round) -> Transition:
    return replace(round_, phase=Phase.COMMITTING, asked=NOBODY), (*_released(round_), Commit())


def _released(round_: Round) -> tuple[Action, ...]:
    return (Release(round_.asked),) if round_.asked else ()


def _after_commit(round_: Round, policy: Policy) -> Transition:
    version = round_.number + 1
    following = Round(version, paused=round_.paused, stopping=round_.stopping)
    last = version >= policy.rounds or bool(round_.stopping)
    if policy.evaluation_due(version, last):
        return replace(following, phase=Phase.EVALUATING), (Wait(),)
    return _next(following, policy)


def _after_evaluation(round_: Round, policy: Policy) -> Transition:
    return _next(replace(round_, phase=Phase.WAITING, attempt=0), policy)


def _next(round_: Round, policy: Policy) -> Transition:
    if round_.stopping:
        return _finished(round_, round_.stopping)
    if round_.number >= policy.rounds:
        return _finished(round_, ALL_ROUNDS_DONE)
    return round_, ()


def _finished(round_: Round, reason: str) -> Transition:
    return replace(round_, phase=Phase.FINISHED, stopping=reason), (Finish(reason),)


# ---- after a restart ---------------------------------------------------------------------------


def resume(round_: Round, policy: Policy, stored: Clients) -> Transition:
    """Return the state and the actions with which a restarted server continues the stored round.

    The policy may be another one than before. `stored` are the clients whose updates are on the
    disk: with durability per round, updates that were only in memory are requested again.
    """
    round_ = _restored(round_, stored)
    match round_.phase:
        case Phase.FINISHED if round_.number < policy.rounds and round_.stopping == ALL_ROUNDS_DONE:
            # The new policy has more rounds.
            return replace(round_, phase=Phase.WAITING, stopping=""), ()
        case Phase.FINISHED:
            return round_, (Finish(round_.stopping),)
        case Phase.AGGREGATING:
            return round_, (Aggregate(round_.received),)
        case Phase.EVALUATING:
            return round_, (Evaluate(round_.asked) if round_.asked else Wait(),)
        case Phase.TRAINING | Phase.WAITING if round_.asked:
            return round_, (Train(round_.asked),)
        case Phase.WAITING:
            return _resume_waiting(round_, policy)
    return round_, ()


def _restored(round_: Round, stored: Clients) -> Round:
    """Return the round without what a restart forgets."""
    if round_.phase in (Phase.VERIFYING, Phase.COMMITTING):
        # The step is computed again; the answers about it are on the disk.
        round_ = replace(round_, phase=Phase.AGGREGATING, asked=NOBODY)
    gone = round_.received - stored
    if not gone:
        return round_
    phase = Phase.TRAINING if round_.phase is Phase.AGGREGATING else round_.phase
    return replace(
        round_, phase=phase, received=round_.received & stored, asked=round_.asked | gone
    )


def _resume_waiting(round_: Round, policy: Policy) -> Transition:
    """Continue a round that waits for clients, none of which owes an update."""
    if round_.received and round_.enough(policy):
        return _aggregate(round_)
    if round_.received:
        return round_, (Wait(),)
    after, actions = _next(round_, policy)
    return after, actions or ((Wait(),) if round_.attempt else ())
