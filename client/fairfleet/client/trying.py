"""Trying a step before it is taken: the losses of a model after it, and after shorter ones."""

from __future__ import annotations

import math
from collections.abc import Iterator

from fairfleet.client.task import Measuring, Progress
from fairfleet.common.codecs import round_to, steady_codec
from fairfleet.common.errors import TaskFailed
from fairfleet.common.tensors import Model, add_change


def trial_losses(
    task: Measuring, model: Model, step: Model, halvings: int, progress: Progress, rounded: str = ""
) -> Iterator[float]:
    """After 2^-k times the step, for k = 0 to `halvings`; infinite where the model diverges.

    `rounded` is the codec that models are rounded to, if any: those that are tried are those that can be published.
    """
    trial = Model.empty(model.signature)
    for k in range(halvings + 1):
        add_change(model, step, k, out=trial)
        if rounded:
            round_to(steady_codec(rounded), trial.parameters)
        try:
            loss = float(task.training_loss(trial.named()))
        except TaskFailed:  # which is how a task says that a loss is not finite
            loss = math.inf
        found = loss if math.isfinite(loss) else math.inf
        progress(k + 1, halvings + 1, found)
        yield found
