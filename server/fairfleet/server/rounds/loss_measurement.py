"""Decides how clients measure the losses that they report.

An exact loss takes a pass over all of a client's data, so it is requested only where a decision
depends on it: in the rule, admission, selection or verification.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveInt

from fairfleet.common.training_plan import LossPlan
from fairfleet.server.aggregation.admission import AdmissionSettings
from fairfleet.server.rounds.selection import Selection
from fairfleet.server.rules import Recipe
from fairfleet.server.rules.base import reads_losses


class LossSettings(BaseModel):
    """How clients measure the losses that they report; see docs/how-to/edge.md."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    before: Literal["auto", "exact", "sampled"] = Field(
        default="auto",
        description="loss of the received model. auto: exact where the rule, admission, selection "
        "or verification uses it, else the mean of the batch losses, which takes no pass",
    )
    after: Literal["none", "exact", "sampled"] = Field(
        default="none", description="loss of the trained model; nothing on the server uses it"
    )
    samples: PositiveInt = Field(default=1000, description="samples of a sampled loss")

    def plan(self, *, used: bool) -> LossPlan:
        """Return what clients are to measure, given whether something uses the loss before."""
        automatic: Literal["exact", "batches"] = "exact" if used else "batches"
        before = automatic if self.before == "auto" else self.before
        samples = self.samples if "sampled" in (before, self.after) else 0
        return LossPlan(before=before, after=self.after, samples=samples)


def uses_losses(
    recipe: Recipe, admission: AdmissionSettings, selection: Selection, *, verifies: bool
) -> bool:
    """Return whether a decision depends on the losses that clients report."""
    return (
        verifies
        or reads_losses(recipe.rule)
        or recipe.rule.needs().line_search
        or admission.loss in ("winsorise", "reject")
        or selection == "power_of_choice"
    )
