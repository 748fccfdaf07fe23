"""Trials of a step before the server takes it.

A client measures its training loss after the full step and after shorter ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from fairfleet.client.task import Measuring, Progress
from fairfleet.common.codecs import round_to, steady_codec
from fairfleet.common.errors import BadRequest, TaskFailed
from fairfleet.common.tensors import Arrays, Model, add_change
from fairfleet.common.wire import MOST_HALVINGS


def trial_losses(
    task: Measuring, model: Model, step: Model, halvings: int, progress: Progress, rounded: str = ""
) -> Iterator[float]:
    """Yield the loss after 2^-k times the step, for k = 0 to `halvings`.

    The loss is infinite where the model diverges. `rounded` is the codec that published models
    are rounded to, if any: the models tried here are those that can be published. Raises
    BadRequest, before any trial, for more halvings than the protocol allows. Each trial is a pass
    over the training data, so the limit keeps a server from occupying a client without end.
    """
    if halvings > MOST_HALVINGS:
        raise BadRequest(
            f"the server requests trials of a step at {halvings} halvings; at most "
            f"{MOST_HALVINGS} are allowed. Its operator can set a smaller verification.halvings."
        )
    trial = Model.empty(model.signature)
    for k in range(halvings + 1):
        add_change(model, step, k, out=trial)
        if rounded:
            round_to(steady_codec(rounded), trial.parameters)
        loss = _loss_or_infinity(task, trial.named())
        progress(k + 1, halvings + 1, loss)
        yield loss


def _loss_or_infinity(task: Measuring, model: Arrays) -> float:
    try:
        loss = float(task.training_loss(model))
    except TaskFailed:  # A task raises this when a loss is not finite.
        return math.inf
    return loss if math.isfinite(loss) else math.inf
