"""What this machine gives to one training. A client may do less than the plan, and its report then says so.

Steps and memory are settled beforehand, by a smaller plan; the time can only be watched while the task trains.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt

from fairfleet.client.task import Task
from fairfleet.common.errors import UsageError
from fairfleet.common.plan import Plan
from fairfleet.common.reports import TrainReport


class Budget(BaseModel):
    """Per training; what is not given is not limited."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    steps: PositiveInt | None = Field(default=None, description="solver steps at most")
    seconds: PositiveFloat | None = Field(default=None, description="no step begins after so many")
    memory_mb: PositiveInt | None = Field(
        default=None, description="for one step (model, gradient, solver, what the batch needs): batches get smaller"
    )

    def largest_batch(self, task: Task) -> int | None:
        """How many samples a step of this task may take; None: as many as the plan says."""
        if self.memory_mb is None:
            return None
        fits = getattr(task, "fit_into", None)
        if fits is None:
            raise UsageError(
                f"{type(task).__name__} cannot keep to a memory budget. Give it a method fit_into(memory_bytes) that "
                "returns the largest batch, or leave --max-memory-mb out."
            )
        batch: int = fits(self.memory_mb * 1_000_000)
        if batch < 1:
            raise UsageError(
                f"one training step needs more than {self.memory_mb} MB even with a single sample. "
                "Give more as --max-memory-mb, or leave it out."
            )
        return batch


@dataclass
class Training:
    """One training within a budget: the plan that is carried out, and in the end what the report says of it."""

    asked: Plan
    samples: int
    budget: Budget = field(default_factory=Budget)
    largest_batch: int | None = None
    now: Callable[[], float] = time.monotonic
    out_of_time: bool = False

    def __post_init__(self) -> None:
        self._began = self.now()
        self.planned_steps = self.asked.steps_for(self.samples)
        whole = min(self.asked.batch_size or self.samples, self.samples)
        self.batch_size = min(whole, self.largest_batch or whole)
        self._fewer_steps = self.budget.steps is not None and self.budget.steps < self.planned_steps
        self._smaller_batches = self.batch_size < whole

    @property
    def plan(self) -> Plan:
        """The plan itself where it fits. Smaller batches do not mean more of them: that would not be less work."""
        if not self._fewer_steps and not self._smaller_batches:
            return self.asked
        steps = min(self.planned_steps, self.budget.steps or self.planned_steps)
        return self.asked.model_copy(update={"epochs": 0, "steps": steps, "batch_size": self.batch_size})

    def enough(self) -> bool:
        """Asked by the task after each step: whether to stop here."""
        limit = self.budget.seconds
        self.out_of_time = self.out_of_time or (limit is not None and self.now() - self._began >= limit)
        return self.out_of_time

    def told(self, report: TrainReport) -> TrainReport:
        """The task's report with what was planned, and what cut it short."""
        cuts = {
            "steps": self._fewer_steps,
            "seconds": self.out_of_time and report.steps < self.plan.steps_for(self.samples),
            "memory": self._smaller_batches,
        }
        return report.model_copy(
            update={
                "planned_steps": self.planned_steps,
                "batch_size": self.batch_size,
                "cut_by": tuple(what for what, cut in cuts.items() if cut),
            }
        )
