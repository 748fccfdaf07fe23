"""A rule in twelve lines: follow the clients with the largest losses."""

from typing import ClassVar

from pydantic import Field

from fairfleet.server.rules import Cohort, Rule, State, Step


class LargestLoss(Rule):
    """The mean of the updates whose loss is at least `share` of the largest."""

    summary: ClassVar[str] = "the mean of the clients served worst"
    share: float = Field(default=1.0, ge=0.0, le=1.0)

    def step(self, cohort: Cohort, state: State) -> Step:
        """Return equal coefficients for the clients with large losses."""
        worst = cohort.losses >= self.share * cohort.losses.max()
        return Step(worst / worst.sum())
