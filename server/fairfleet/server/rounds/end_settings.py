"""The settings that end a federation before all its rounds are done."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, NonNegativeInt, PositiveFloat

from fairfleet.server.rounds.measure_choice import AUTO_MEASURE
from fairfleet.server.rounds.stopping import StopConditions


class EndSettings(BaseModel):
    """Conditions that stop the federation before all rounds are done."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    after_seconds: PositiveFloat | None = Field(
        default=None, description="time since the federation started"
    )
    worst_10_percent: FiniteFloat | None = Field(
        default=None,
        description="stop when the mean of the worst-served tenth reaches this, in the unit of "
        "`measure`; of an accuracy 0 to 1",
    )
    plateau: NonNegativeInt = Field(
        default=0,
        description="stop after this many evaluations without a better worst tenth; 0: never",
    )
    plateau_margin: float = Field(
        default=0.001, ge=0, description="least gain that counts as better, in the same unit"
    )

    def check(self, measure: str, evaluate_every: int) -> None:
        """Raise ValueError for conditions that can never apply."""
        if not evaluate_every and (rules := self.ending().on_evaluations()):
            raise ValueError(
                f"{rules[0]} needs evaluations, but round.evaluate_every is 0; give the rounds "
                "between evaluations"
            )
        target = self.worst_10_percent
        if target is not None and measure in (AUTO_MEASURE, "accuracy") and not 0 < target <= 1:
            raise ValueError(
                f"end.worst_10_percent is {target:g}, but an accuracy lies between 0 and 1; for "
                "another measure set `measure`"
            )

    def ending(self) -> StopConditions:
        """Return the conditions as the round's logic takes them."""
        return StopConditions(**self.model_dump())
