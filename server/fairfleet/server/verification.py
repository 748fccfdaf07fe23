"""Which of the steps that clients tried is taken: the longest under which enough of their losses fell.

A rule promises to first order that losses fall (g_k . d > 0); whether they do after a step of some length only their
owners can say. Pure functions of the losses they report.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from fairfleet.common.fairness import improved_share
from fairfleet.server.rules.base import Trials, Vector

Fallback = Literal["commit", "smallest", "skip"]
Losses = Mapping[str, float]  # by client
Answers = Mapping[str, Sequence[float]]  # by client, one loss per trial, the longest step first


@dataclass(frozen=True)
class Terms:
    """Under which a step is taken."""

    halvings: int = 4
    threshold: float = 0.8  # share of those who answered whose loss must fall
    quorum: float = 0.5  # share of the participants whose answers suffice
    fallback: Fallback = "smallest"


@dataclass(frozen=True)
class Verdict:
    outcome: str  # accepted, searched, or the fallback
    reason: str
    halvings: int | None  # of the longest trial; None: no step is taken
    improved: tuple[float, ...] = ()  # by trial: share of those who answered whose loss fell


def speaks(losses: Sequence[float]) -> bool:
    """Whether an answer tells anything: losses that are infinite after every trial, however short, do not."""
    return any(map(math.isfinite, losses))


def decide(trials: Trials, terms: Terms, before: Losses, answers: Answers, rate: float = 1.0) -> Verdict:
    """`before` has the losses of all participants under the model as it is."""
    answers = {client: losses for client, losses in answers.items() if speaks(losses)}
    if len(answers) < max(1.0, terms.quorum * len(before)):
        return _fall_back(trials, terms, (), f"{len(answers)} of {len(before)} participants answered")
    clients = sorted(answers)
    old = np.array([before[client] for client in clients])
    new = np.array([answers[client] for client in clients]).T
    improved = tuple(improved_shares(old, new))
    if trials.search is not None:
        found = trials.search(clients, old, new, rate=rate)
        if found is None:
            return _fall_back(
                trials, terms, improved, "the rule's line search: some loss is infinite after every trial"
            )
        why = "the rule's line search" + ("" if found.accepted else " accepted none; the best of those tried")
        return Verdict("accepted" if found.accepted else "searched", why, found.halvings, improved)
    for halvings, share in enumerate(improved):
        if share >= terms.threshold:
            return Verdict("accepted", f"{share:.0%} of {len(clients)} losses fell", halvings, improved)
    best = f"at best {max(improved):.0%} of {len(clients)} losses fell, {terms.threshold:.0%} were wanted"
    return _fall_back(trials, terms, improved, best)


def improved_shares(before: Vector, after: Vector) -> list[float]:
    """One share per line of `after`; a loss that is infinite has not fallen."""
    return [improved_share(before, np.nan_to_num(line), higher_is_better=False) for line in after]


def _fall_back(trials: Trials, terms: Terms, improved: tuple[float, ...], reason: str) -> Verdict:
    halvings = {"commit": trials.doublings, "smallest": trials.halvings, "skip": None}[terms.fallback]
    return Verdict(terms.fallback, reason, halvings, improved)
