"""Verified descent in a simulation: the round's clients try a step, and shorter ones, before it is taken."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from fairfleet.common.errors import TaskFailed
from fairfleet.common.tensors import Model, add_change
from fairfleet.lab.cohort import Trainer
from fairfleet.server.aggregation import Taken
from fairfleet.server.rules.base import Trials
from fairfleet.server.verification import Losses, Terms, Verdict, decide, speaks


def wanted_trials(taken: Taken, terms: Terms | None) -> Trials | None:
    """As the server's committer has it: the rule's own, else those of the terms; none for a step that goes nowhere."""
    trials = taken.trials or (Trials(terms.halvings) if terms else None)
    return trials if taken.vector.any() else None


def take_verified(
    model: Model, step: Model, taken: Taken, trials: Trials, terms: Terms, trainer: Trainer, before: Losses
) -> float:
    """Makes of `step`, which holds what to subtract, the next model. Which part of the step was taken; 0: none."""
    np.multiply(step.parameters, np.float32(-(2.0**trials.doublings)), out=step.parameters)
    trial = Model.empty(model.signature)
    numbers = [trainer.data.names.index(client) for client in sorted(before)]

    def tried() -> Iterator[list[float]]:
        for halvings in range(trials.halvings + 1):
            add_change(model, step, halvings, out=trial)
            yield losses_of(trainer, trial, numbers)

    verdict = decide_early(trials, terms, before, tried(), taken.rate)
    if verdict.halvings is None:
        step.overwrite(model)
    else:
        add_change(model, step, verdict.halvings, out=step)
    return trials.factor(verdict.halvings)


def decide_early(
    trials: Trials, terms: Terms, before: Losses, tried: Iterator[Sequence[float]], rate: float = 1.0
) -> Verdict:
    """The verdict on all trials, without those after the first accepted one: they cannot change it.

    `tried` has the losses of the clients, in the order of their names, after each trial.
    """
    answers: dict[str, list[float]] = {client: [] for client in sorted(before)}
    for losses in tried:
        for told, loss in zip(answers.values(), losses, strict=True):
            told.append(loss)
        # a client whose losses were all infinite counts once a shorter trial gives it a finite one
        if all(map(speaks, answers.values())):
            verdict = decide(trials, terms, before, answers, rate)
            if verdict.outcome == "accepted":
                return verdict
    return decide(trials, terms, before, answers, rate)


def losses_of(trainer: Trainer, model: Model, clients: Sequence[int]) -> list[float]:
    """Infinite where the model diverges, which some trainers say by an error and others by a NaN."""
    try:
        found = trainer.losses(model, clients)
    except TaskFailed:
        if len(clients) == 1:
            return [math.inf]
        return [loss for client in clients for loss in losses_of(trainer, model, [client])]
    return [loss if math.isfinite(loss) else math.inf for loss in found]
