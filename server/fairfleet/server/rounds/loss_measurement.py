"""Decides how clients measure the losses that they report.

An exact loss takes a pass over all of a client's data, so it is requested only where a decision
depends on it: in the rule, admission, selection or verification.
"""

from __future__ import annotations

from typing import Literal, Protocol

from pydantic import BaseModel, ConfigDict, Field, PositiveInt

from fairfleet.common.training_plan import LossPlan
from fairfleet.server.aggregation.admission import AdmissionSettings
from fairfleet.server.aggregation.rule_loss import LossOfRule
from fairfleet.server.rounds.selection import Selection
from fairfleet.server.rules import Recipe
from fairfleet.server.rules.base import reads_losses
from fairfleet.server.rules.errors import RuleError


class LossSettings(BaseModel):
    """How clients measure the losses that they report; see docs/how-to/edge.md."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    before: Literal["auto", "exact", "sampled"] = Field(
        default="auto",
        description="loss of the received model. auto: exact where the rule, admission, selection "
        "or verification uses it, else the mean of the batch losses, which takes no pass",
    )
    after: Literal["none", "exact", "sampled"] = Field(
        default="none", description="loss of the trained model; none: exact if the rule receives it"
    )
    rule: LossOfRule = Field(
        default="before",
        description="loss that the rule receives: of the received model, or of the trained one as "
        "in Algorithm 1 of AdaFed",
    )
    samples: PositiveInt = Field(default=1000, description="samples of a sampled loss")

    def plan(self, *, used: bool) -> LossPlan:
        """Return what clients are to measure, given whether something uses the loss before."""
        automatic: Literal["exact", "batches"] = "exact" if used else "batches"
        before = automatic if self.before == "auto" else self.before
        after = "exact" if self.rule == "after" and self.after == "none" else self.after
        samples = self.samples if "sampled" in (before, after) else 0
        return LossPlan(before=before, after=after, samples=samples)


class PrivateReports(Protocol):
    """The settings of privacy, as far as they concern the losses of reports."""

    @property
    def reports(self) -> str:
        """Return `noised` if reports have only what noise covers."""


def check_rule_loss(
    losses: LossSettings,
    recipe: Recipe,
    verification: object | None,
    privacy: PrivateReports | None,
) -> None:
    """Raise RuleError if the rule cannot receive the loss that the settings choose."""
    if losses.rule == "before":
        return
    if verification is not None or recipe.rule.needs().line_search:
        raise RuleError(
            "losses.rule: after does not go with verification or the line search of a rule such "
            "as fedmdfg: losses after trial steps are compared with those before training. Use "
            "losses.rule: before"
        )
    if privacy is not None and privacy.reports == "noised":
        raise RuleError(
            "losses.rule: after does not go with noised reports, which have no loss after "
            "training. Use losses.rule: before, or privacy.reports: uncovered"
        )


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
