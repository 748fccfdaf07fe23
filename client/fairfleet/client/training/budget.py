"""The limits that this machine sets for one training.

A client may do less than the plan, and its report then says so. Limits on steps and memory are
applied in advance, by a smaller plan. The time is checked while the task trains.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt

from fairfleet.client.task import Task
from fairfleet.common.errors import UsageError
from fairfleet.common.reports import TrainReport
from fairfleet.common.training_plan import Plan


class Budget(BaseModel):
    """Limits of one training. What is not set is not limited."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    steps: PositiveInt | None = Field(default=None, description="maximum number of solver steps")
    seconds: PositiveFloat | None = Field(
        default=None, description="no step starts after this many seconds"
    )
    memory_mb: PositiveInt | None = Field(
        default=None,
        description="memory for one step (model, gradient, solver and batch), in MB; a smaller "
        "value means smaller batches",
    )

    def largest_batch(self, task: Task) -> int | None:
        """Return how many samples one step of this task may use, or None for no limit.

        Raises UsageError if the task cannot limit its memory, or one sample does not fit.
        """
        if self.memory_mb is None:
            return None
        fit_into = getattr(task, "fit_into", None)
        if fit_into is None:
            raise UsageError(
                f"{type(task).__name__} cannot keep to a memory budget. Give it a method "
                "fit_into(memory_bytes) that returns the largest batch, or leave "
                "--max-memory-mb out."
            )
        batch: int = fit_into(self.memory_mb * 1_000_000)
        if batch < 1:
            raise UsageError(
                f"one training step needs more than {self.memory_mb} MB even with a single sample. "
                "Give a larger --max-memory-mb, or leave it out."
            )
        return batch


@dataclass
class Training:
    """One training within a budget: the plan to follow, and what the report says about it."""

    requested: Plan
    samples: int
    budget: Budget = field(default_factory=Budget)
    largest_batch: int | None = None
    now: Callable[[], float] = time.monotonic
    out_of_time: bool = False

    def __post_init__(self) -> None:
        self._began = self.now()
        self.planned_steps = self.requested.steps_for(self.samples)
        planned_batch = min(self.requested.batch_size or self.samples, self.samples)
        self.batch_size = min(planned_batch, self.largest_batch or planned_batch)
        self._fewer_steps = self.budget.steps is not None and self.budget.steps < self.planned_steps
        self._smaller_batches = self.batch_size < planned_batch

    @property
    def plan(self) -> Plan:
        """The plan to follow: the requested one if it fits, else a smaller one.

        Smaller batches do not mean more of them, because that would not be less work.
        """
        if not self._fewer_steps and not self._smaller_batches:
            return self.requested
        steps = min(self.planned_steps, self.budget.steps or self.planned_steps)
        return self.requested.model_copy(
            update={"epochs": 0, "steps": steps, "batch_size": self.batch_size}
        )

    def enough(self) -> bool:
        """Return whether the time is used up. The task calls this after each step."""
        limit = self.budget.seconds
        self.out_of_time = self.out_of_time or (
            limit is not None and self.now() - self._began >= limit
        )
        return self.out_of_time

    def complete_report(self, report: TrainReport) -> TrainReport:
        """Return the task's report with the planned steps and the limits that cut it short."""
        cuts = {
            "steps": self._fewer_steps,
            "seconds": self.out_of_time and report.steps < self.plan.steps_for(self.samples),
            "memory": self._smaller_batches,
        }
        return report.model_copy(
            update={
                "planned_steps": self.planned_steps,
                "batch_size": self.batch_size,
                "cut_by": tuple(limit for limit, was_reached in cuts.items() if was_reached),
            }
        )
