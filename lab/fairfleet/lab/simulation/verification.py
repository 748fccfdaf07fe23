"""Verified descent in a simulation: the round's clients try a step, and shorter ones, first.

The verdict is the server's own. Trials that cannot change it are left out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from fairfleet.common.errors import TaskFailed
from fairfleet.common.tensors import Model, add_change
from fairfleet.lab.simulation.trainer import Trainer
from fairfleet.server.aggregation.staging import StagedStep
from fairfleet.server.rounds.verification import (
    Losses,
    StepVerdict,
    VerificationPolicy,
    decide,
    speaks,
)
from fairfleet.server.rules import StepTrials


def take_verified(
    model: Model,
    change: Model,
    staged: StagedStep,
    policy: VerificationPolicy | None,
    trainer: Trainer,
    before: Losses,
) -> float:
    """Turn the longest change, which the clients try, into the next model.

    Return the part of the optimizer's step that was taken; 0 if none was.
    """
    assert staged.trials is not None
    verdict = decide_early(
        staged.trials,
        policy or VerificationPolicy(),
        before,
        _trial_losses(model, change, staged.trials, trainer, sorted(before)),
        staged.step.rate,
    )
    if verdict.halvings is None:
        change.overwrite(model)
    else:
        add_change(model, change, verdict.halvings, out=change)
    return staged.trials.factor(verdict.halvings)


def _trial_losses(
    model: Model, change: Model, trials: StepTrials, trainer: Trainer, clients: Sequence[str]
) -> Iterator[list[float]]:
    """Yield the clients' losses after each trial, from the longest change to the shortest."""
    trial = Model.empty(model.signature)
    numbers = [trainer.data.names.index(client) for client in clients]
    for halvings in range(trials.halvings + 1):
        add_change(model, change, halvings, out=trial)
        yield losses_or_infinite(trainer, trial, numbers)


def decide_early(
    trials: StepTrials,
    policy: VerificationPolicy,
    before: Losses,
    trial_losses: Iterator[Sequence[float]],
    rate: float = 1.0,
) -> StepVerdict:
    """Return the verdict on all trials, without running those after the first accepted one.

    Later trials cannot change the verdict. `trial_losses` yields the losses of the clients, in
    the order of their names, after each trial.
    """
    answers: dict[str, list[float]] = {client: [] for client in sorted(before)}
    for losses in trial_losses:
        for answer, loss in zip(answers.values(), losses, strict=True):
            answer.append(loss)
        # A client with only infinite losses counts once a shorter trial gives it a finite one.
        if all(map(speaks, answers.values())):
            verdict = decide(trials, policy, before, answers, rate)
            if verdict.outcome == "accepted":
                return verdict
    return decide(trials, policy, before, answers, rate)


def losses_or_infinite(trainer: Trainer, model: Model, clients: Sequence[int]) -> list[float]:
    """Return the clients' losses, with infinity where the model diverges.

    Some trainers report a diverged model by an error, others by NaN.
    """
    try:
        losses = trainer.losses(model, clients)
    except TaskFailed:
        if len(clients) == 1:
            return [math.inf]
        return [loss for client in clients for loss in losses_or_infinite(trainer, model, [client])]
    return [loss if math.isfinite(loss) else math.inf for loss in losses]
