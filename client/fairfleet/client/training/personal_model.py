"""Ditto's personal model: trained next to the global one, pulled towards it, and never sent.

It is stored on the client's own disk, so it survives a restart.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from fairfleet.client.task import Job, Progress, Task
from fairfleet.common.atomic_files import Sync, write_atomically
from fairfleet.common.errors import UsageError
from fairfleet.common.reports import Evaluation
from fairfleet.common.tensors import Model
from fairfleet.common.training_plan import NO_PASSES, Plan


class PersonalModel:
    """The personal model of one client, in memory and in a file."""

    def __init__(self, folder: Path) -> None:
        self.move_to(folder)

    def move_to(self, folder: Path) -> None:
        """Use the personal model in another folder from now on."""
        self._path = folder / "personal.safetensors"
        self._model: Model | None = None

    def train(
        self,
        task: Task,
        received: Model,
        plan: Plan,
        progress: Progress,
        enough: Callable[[], bool] = lambda: False,
    ) -> None:
        """Continue training the personal model, with the received model as its anchor."""
        model = self._load(received)
        train_personal(task, model, received, plan, progress, enough)
        # A damaged file is ignored by `_load`, so no fsync delays the client.
        write_atomically(self._path, model.save, sync=Sync.NOTHING)
        self._model = model

    def evaluate(self, task: Task, shared: Evaluation) -> Evaluation:
        """Return the global model's evaluation, plus that of the personal model if there is one."""
        if self._model is None:
            return shared
        own = task.evaluate(self._model.named())
        return shared.model_copy(
            update={
                "personal_loss": own.loss,
                "personal_accuracy": own.accuracy,
                "personal_measures": own.measures,
            }
        )

    def _load(self, received: Model) -> Model:
        """Return the model in memory, else the one on disk, else a copy of the received model.

        A file that is damaged or belongs to another model is ignored.
        """
        if self._model is not None:
            return self._model
        if self._path.exists():
            try:
                model, _ = Model.load(self._path)
                if model.signature == received.signature:
                    return model
            except UsageError:
                pass  # The file is damaged, so the personal model starts again.
        return first_personal(received)


def first_personal(received: Model) -> Model:
    """Return a client's first personal model: a copy of the first model that it receives."""
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
    """Train the personal model in place, with the received model as its anchor."""
    proximal_plan = plan.model_copy(
        update={"proximal_mu": plan.personal_lambda, "personal_lambda": 0.0}
    )
    job = Job(
        proximal_plan, progress=progress, anchor=received.named(), enough=enough, losses=NO_PASSES
    )
    model.assign(task.train(model.named(), job).arrays)
