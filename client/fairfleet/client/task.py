"""What a user writes: a Task. Named arrays and a plan in, trained arrays and a report out.

Framework-neutral: nothing here imports torch. `fairfleet.client.torch.TorchTask` is the usual
way to have one; whoever wants their own loop implements `Task`.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from fairfleet.common.errors import UsageError
from fairfleet.common.plan import Plan
from fairfleet.common.reports import Evaluation, TrainReport
from fairfleet.common.tensors import Arrays, Model

Progress = Callable[[int, int, float], None]  # steps done, steps planned, loss of the last step


class Abandoned(Exception):
    """Raised out of `Job.progress` when the result is no longer wanted. A task lets it pass."""


@dataclass(frozen=True)
class Job:
    """One training as asked for by the server."""

    plan: Plan
    want_gradient_norm: bool = False
    progress: Progress = lambda done, planned, loss: None  # to be called after each step; may raise Abandoned
    anchor: Arrays | None = None  # what the plan's proximal term pulls to; None: the received model
    enough: Callable[[], bool] = lambda: False  # to be asked after each step: True ends the training here


@dataclass(frozen=True)
class Trained:
    arrays: Arrays  # every tensor of the model, by name, after training
    report: TrainReport


@runtime_checkable
class Task(Protocol):
    train_samples: int
    test_samples: int  # 0: evaluate is never called
    device: str  # for people to read: cpu, cuda, mps

    def initial_model(self) -> Model:
        """The model before any training; also says which tensors there are."""

    def train(self, model: Arrays, job: Job) -> Trained:
        """`model` are read-only views of the received tensors, floats as float32 and integers as int64.

        The report says how many steps were taken, which may be fewer than the plan's.
        """

    def evaluate(self, model: Arrays) -> Evaluation:
        """How the received model does on the client's own test data."""


@runtime_checkable
class Measuring(Protocol):
    """What a task may also have: without it, its client is not asked to try steps before they are taken."""

    def training_loss(self, model: Arrays) -> float:
        """Of a model on the client's own training data, measured as `TrainReport.loss_before` is."""


def load_task(spec: str, options: Mapping[str, str]) -> Task:
    """The task that `module:name` says: a Task, or a function that makes one from the options."""
    module_name, _, name = spec.partition(":")
    if not module_name or not name:
        raise UsageError(f"--task {spec!r} is not of the form module:name, for example my_task:task")
    sys.path.insert(0, os.getcwd())  # a task of one's own lies where one stands, as with `python -m`
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name != module_name.split(".")[0]:
            raise UsageError(f"--task {spec}: importing it needs {error.name}, which is not installed") from error
        raise UsageError(f"--task {spec}: no module {module_name!r} here or among the installed packages") from error
    finally:
        sys.path.remove(os.getcwd())
    found = getattr(module, name, None)
    if found is None:
        raise UsageError(f"--task {spec}: module {module_name} has no {name!r}")
    return _make(spec, found, options)


def _make(spec: str, found: object, options: Mapping[str, str]) -> Task:
    if callable(found) and not isinstance(found, Task):
        try:
            found = found(**options)
        except TypeError as error:
            raise UsageError(f"--task {spec}: {error}; options are given as --option name=value") from error
    elif options:
        raise UsageError(f"--task {spec} is not a function, so it takes no options; found {', '.join(options)}")
    if not isinstance(found, Task):
        raise UsageError(f"--task {spec} is {type(found).__name__}, not a Task; see fairfleet.client.task")
    return found
