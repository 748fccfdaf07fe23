"""Ditto's personal model: trained beside the global one, pulled to it, and never sent anywhere.

Kept on the client's own disk, so that it survives a restart.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from fairfleet.client.task import Job, Progress, Task
from fairfleet.common.errors import UsageError
from fairfleet.common.plan import Plan
from fairfleet.common.reports import Evaluation
from fairfleet.common.tensors import Model


class Personal:
    def __init__(self, folder: Path) -> None:
        self._path = folder / "personal.safetensors"
        self._model: Model | None = None

    def train(
        self, task: Task, received: Model, plan: Plan, progress: Progress, enough: Callable[[], bool] = lambda: False
    ) -> None:
        """One training of the personal model, from where it was, with the received model as its anchor."""
        model = self._find(received)
        train_personal(task, model, received, plan, progress, enough)
        beside = self._path.with_suffix(".new")
        model.save(beside)
        os.replace(beside, self._path)
        self._model = model

    def evaluate(self, task: Task, shared: Evaluation) -> Evaluation:
        """The evaluation of the global model, with that of the personal one beside it if there is one."""
        if self._model is None:
            return shared
        own = task.evaluate(self._model.named())
        return shared.model_copy(update={"personal_loss": own.loss, "personal_accuracy": own.accuracy})

    def _find(self, received: Model) -> Model:
        """The one in memory, else the one on the disk if it is of this model, else a copy of the received one."""
        if self._model is not None:
            return self._model
        if self._path.exists():
            try:
                model, _ = Model.load(self._path)
                if model.signature == received.signature:
                    return model
            except UsageError:
                pass  # damaged: it begins anew
        return first_personal(received)


def first_personal(received: Model) -> Model:
    """Where a client's personal model begins: at the first model that it receives."""
    model = Model.empty(received.signature)
    model.assign(received.named())
    return model


def train_personal(
    task: Task,
    model: Model,
    received: Model,
    plan: Plan,
    progress: Progress = lambda done, planned, loss: None,
    enough: Callable[[], bool] = lambda: False,
) -> None:
    """Changes the model, which is the client's own, with the received one as its anchor."""
    near = plan.model_copy(update={"proximal_mu": plan.personal_lambda, "personal_lambda": 0.0})
    trained = task.train(model.named(), Job(near, progress=progress, anchor=received.named(), enough=enough))
    model.assign(trained.arrays)
