"""A policy, and rounds after given events."""

from __future__ import annotations

from fairfleet.server.rounds.state_machine import (
    Event,
    Policy,
    Round,
    step,
)

POLICY = Policy(rounds=3, quorum=0.5)


def clients(*names: str) -> frozenset[str]:
    """Return a set of clients."""
    return frozenset(names)


def after(round_: Round, *events: Event, policy: Policy = POLICY) -> Round:
    """Return the round after these events."""
    for event in events:
        round_, _ = step(round_, event, policy)
    return round_
