"""The interface between FairFleet and a user's training code.

A user writes a `Task`: it receives named arrays and a plan, and returns trained arrays and a
report. Nothing here imports torch, so any framework will do. `fairfleet.client.torch.TorchTask`
is the usual way to get a task; implement `Task` yourself to keep your own training loop.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Protocol, runtime_checkable

from fairfleet.common.cli.user_modules import import_user_module
from fairfleet.common.errors import UsageError
from fairfleet.common.extras import missing, optional_module
from fairfleet.common.reports import Evaluation, TrainReport
from fairfleet.common.tensors import Arrays, Model
from fairfleet.common.training_plan import LossMeasurement, LossPlan, Plan

Progress = Callable[[int, int, float], None]  # steps done, steps planned, loss of the last step


class Abandoned(Exception):
    """Raised out of `Job.progress` when the result is no longer needed.

    A task must let it pass. The client then drops the training and requests the next task.
    """


def _ignore_progress(done: int, planned: int, loss: float) -> None:
    pass


def _never_enough() -> bool:
    return False


@dataclass(frozen=True)
class Job:
    """One training that the server has requested.

    A training loop reads the plan, calls `progress` after each step, and stops as soon as
    `enough()` is true after a step. A pass that only measures does the same
    between its batches.

    Attributes:
        plan: the solver, its learning rate, the batch size, the number of steps and the seed.
        want_gradient_norm: whether the report must contain the norm of the gradient at the
            received model, over all training data.
        progress: call it after each step as `progress(steps_done, steps_planned, loss)`.
            It may raise `Abandoned`.
        anchor: the tensors that the plan's proximal term pulls towards, by name. None means
            the received model.
        enough: call it after each step. True means that the budget of this machine is used up:
            stop here and report the steps taken so far.
        losses: how the report's losses are to be found. A task may measure more exactly than
            that; its report says how it measured.
    """

    plan: Plan
    want_gradient_norm: bool = False
    progress: Progress = _ignore_progress
    anchor: Arrays | None = None
    enough: Callable[[], bool] = _never_enough
    losses: LossPlan = field(default_factory=LossPlan)

    def measurement_before(self, samples: int) -> LossMeasurement:
        """Return how to measure the loss of the received model, with this many samples.

        A gradient norm takes a pass over all data, which gives the exact loss too.
        """
        if self.want_gradient_norm:
            return "exact"
        return self.losses.measurement(self.losses.before, samples)

    def measurement_after(self, samples: int) -> LossMeasurement:
        """Return how to measure the loss of the trained model; `none`: leave it out."""
        return self.losses.measurement(self.losses.after, samples)


@dataclass(frozen=True)
class Trained:
    """The result of one training.

    Attributes:
        arrays: every tensor of the model after training, by name. The server receives the
            difference to the received model, never the data.
        report: the losses that `Job.losses` wants, the number of samples and the steps taken.
    """

    arrays: Arrays
    report: TrainReport


@runtime_checkable
class Task(Protocol):
    """What a client trains: one model on this machine's own data.

    FairFleet calls the methods from one thread, one call at a time, and keeps the task loaded
    between rounds. An exception in a method makes this client miss the round; it does not end
    the client before three trainings have failed in a row.

    Attributes:
        train_samples: number of training samples.
        test_samples: number of test samples. With 0, `evaluate` is never called.
        device: where the model is trained (cpu, cuda, mps). It is only displayed.
    """

    train_samples: int
    test_samples: int
    device: str

    def initial_model(self) -> Model:
        """Return the model before any training. It also defines the tensors of the model."""

    def train(self, model: Arrays, job: Job) -> Trained:
        """Train the received model on the training data, as `job.plan` says.

        `model` maps names to read-only views of the received tensors: floats as float32,
        integers as int64. The report contains the steps taken, which may be fewer than planned.
        """

    def evaluate(self, model: Arrays) -> Evaluation:
        """Return what this client's test data say about a model.

        That is a loss, an accuracy or measures of the task's own, or several of them, for example
        `Evaluation(samples=90, loss=0.4, measures={"auc": higher(0.93), "mae": lower(2.1)})`.
        """


@runtime_checkable
class Refreshing(Protocol):
    """An optional method of a task whose data may change while the client runs.

    A client whose task has it may start without training samples. It then waits, and takes part
    once there are some.
    """

    def refresh(self) -> None:
        """Look for new data, and set `train_samples` and `test_samples`.

        It is called before each training, and at intervals while the client is idle.
        """


@runtime_checkable
class Measuring(Protocol):
    """An optional method of a task. It lets the server verify a step before it is taken.

    Rule `adafedadam` also uses it, for the loss on the initial model. Clients whose task lacks the
    method are not selected for verification.
    """

    def training_loss(self, model: Arrays) -> float:
        """Return the loss of a model on all training data, as in `TrainReport.loss_before`."""


@runtime_checkable
class Keeping(Protocol):
    """An optional method of a task. It receives the models that this participant may keep."""

    def on_model(self, version: int, model: Arrays) -> None:
        """Take a version that was just evaluated, or the federation's result at its end.

        `model` has read-only views, as in `Task.train`. Their memory is used again: copy what you
        keep. An exception is logged and changes nothing else. The federation's terms may allow only
        the result, or no model.
        """


def load_task(spec: str, options: Mapping[str, str]) -> Task:
    """Return the task that `module:name` refers to.

    The name is that of a Task, or of a function that builds one from the options. The module
    is searched in the current directory first. Raises UsageError if there is no such task.
    """
    module_name, _, name = spec.partition(":")
    if not module_name or not name:
        raise UsageError(
            f"--task {spec!r} is not of the form module:name, for example my_task:task"
        )
    factory = getattr(_import_module(spec, module_name), name, None)
    if factory is None:
        raise UsageError(f"--task {spec}: module {module_name} has no {name!r}")
    return _build_task(spec, factory, options)


def _import_module(spec: str, module_name: str) -> ModuleType:
    try:
        return import_user_module(module_name)
    except ModuleNotFoundError as error:
        if error.name != module_name.split(".")[0]:
            raise _lacks_library(spec, error) from error
        raise UsageError(
            f"--task {spec}: no module {module_name!r} in the current directory or among the "
            "installed packages"
        ) from error


def _lacks_library(spec: str, error: ModuleNotFoundError) -> UsageError:
    if module := optional_module(error):
        return missing(f"--task {spec}", module)
    return UsageError(f"--task {spec} needs {error.name}, which is not installed")


def _build_task(spec: str, factory: object, options: Mapping[str, str]) -> Task:
    """Return `factory` if it is a task already, else the task that it builds."""
    task = factory
    if callable(factory) and not isinstance(factory, Task):
        try:
            task = factory(**options)
        except ModuleNotFoundError as error:
            raise _lacks_library(spec, error) from error
        except TypeError as error:
            raise UsageError(
                f"--task {spec}: {error}; options are given as --option name=value"
            ) from error
    elif options:
        raise UsageError(
            f"--task {spec} is not a function, so it takes no options; found {', '.join(options)}"
        )
    if not isinstance(task, Task):
        raise UsageError(
            f"--task {spec} is {type(task).__name__}, not a Task; see fairfleet.client.task"
        )
    return task
