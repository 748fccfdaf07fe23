"""An aggregation rule of one's own: it decides how much each client's update counts.

A rule never sees an update itself, only the inner products of all updates and the clients' reports.
So its cost does not depend on the size of the model.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from pydantic import Field

from fairfleet.server.rules import Cohort, Rule, State, Step


class LossWeighted(Rule):
    """The mean of the updates, weighted by a power of the clients' losses."""

    summary: ClassVar[str] = "the mean, weighted by a power of each client's loss"
    power: float = Field(default=1.0, ge=0.0, description="0: all clients count the same")

    def step(self, cohort: Cohort, state: State) -> Step:
        """Return one coefficient for each client; they add up to one."""
        weights = np.maximum(cohort.losses, 1e-12) ** self.power
        return Step(weights / weights.sum())
