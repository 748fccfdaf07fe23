"""The choice among the steps that clients tried: the longest under which enough losses fell.

A rule guarantees only to first order that losses fall (g_k . d > 0). Whether they do after a step
of some length, only the clients can measure. These are pure functions of the losses they report.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from fairfleet.common.fairness import improved_share
from fairfleet.common.reports import MAX_LOSS
from fairfleet.server.rules import StepTrials, Vector

Fallback = Literal["commit", "smallest", "skip"]
Losses = Mapping[str, float]  # by client
Answers = Mapping[str, Sequence[float]]  # by client, one loss per trial, the longest step first


@dataclass(frozen=True)
class VerificationPolicy:
    """The conditions under which a step is taken."""

    halvings: int = 4
    threshold: float = 0.8  # share of the answers in which the loss must fall
    quorum: float = 0.5  # share of the participants whose answers suffice
    fallback: Fallback = "smallest"


@dataclass(frozen=True)
class StepVerdict:
    """Which step is taken, and why."""

    outcome: str  # accepted, searched, or the fallback
    reason: str
    halvings: int | None  # of the longest trial; None: no step is taken
    improved: tuple[float, ...] = ()  # by trial: share of the answers in which the loss fell


def speaks(losses: Sequence[float]) -> bool:
    """Return whether an answer is useful: at least one of its losses is finite."""
    return any(map(math.isfinite, losses))


def decide(
    trials: StepTrials,
    policy: VerificationPolicy,
    before: Losses,
    answers: Answers,
    rate: float = 1.0,
) -> StepVerdict:
    """Return which of the tried steps is taken.

    `before` has the losses of all participants under the current model. `rate` is the optimizer's
    learning rate for a step of factor 1.
    """
    answers = {client: losses for client, losses in answers.items() if speaks(losses)}
    if len(answers) < max(1.0, policy.quorum * len(before)):
        reason = f"{len(answers)} of {len(before)} participants answered"
        return _fall_back(trials, policy, (), reason)
    clients = sorted(answers)
    old = np.array([before[client] for client in clients])
    new = bounded(np.array([answers[client] for client in clients]).T)
    improved = tuple(improved_shares(old, new))
    if trials.search is None:
        return _longest_improving(trials, policy, improved, len(clients))
    result = trials.search(clients, old, new, rate=rate)
    if result is None:
        reason = "the rule's line search: some loss is infinite after every trial"
        return _fall_back(trials, policy, improved, reason)
    if result.accepted:
        return StepVerdict("accepted", "the rule's line search", result.halvings, improved)
    reason = "the rule's line search accepted none; the best of those tried"
    return StepVerdict("searched", reason, result.halvings, improved)


def _longest_improving(
    trials: StepTrials, policy: VerificationPolicy, improved: tuple[float, ...], clients: int
) -> StepVerdict:
    """Take the longest step under which enough losses fell, or the fallback."""
    for halvings, share in enumerate(improved):
        if share >= policy.threshold:
            reason = f"{share:.0%} of {clients} losses fell"
            return StepVerdict("accepted", reason, halvings, improved)
    reason = (
        f"at best {max(improved):.0%} of {clients} losses fell, "
        f"{policy.threshold:.0%} were required"
    )
    return _fall_back(trials, policy, improved, reason)


def bounded(losses: Vector) -> Vector:
    """Return losses with values above any valid report as infinite, and a valid lower bound."""
    return np.where(losses > MAX_LOSS, np.inf, np.maximum(losses, -MAX_LOSS))


def improved_shares(before: Vector, after: Vector) -> list[float]:
    """Return one share per row of `after`; an infinite loss has not fallen."""
    return [improved_share(before, np.nan_to_num(row), higher_is_better=False) for row in after]


def _fall_back(
    trials: StepTrials, policy: VerificationPolicy, improved: tuple[float, ...], reason: str
) -> StepVerdict:
    halvings_of = {"commit": trials.doublings, "smallest": trials.halvings, "skip": None}
    halvings = halvings_of[policy.fallback]
    return StepVerdict(policy.fallback, reason, halvings, improved)
