"""Decides whether a training report is complete enough for its update to be accepted.

The fields of every report must lie within fixed ranges. In addition, each rule states which fields
it needs, which of them it divides by, and for which losses it is defined (`Needs`). Aggregation
checks reports again, because an update may have been stored before a requirement existed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from fairfleet.common.errors import BadReport
from fairfleet.common.reports import MAX_LOSS, TrainReport
from fairfleet.common.training_plan import EXACTNESS, LossMeasurement
from fairfleet.server.aggregation.rule_loss import LossOfRule
from fairfleet.server.rules import Needs, Recipe

MAX_LEARNING_RATE = 1e6
MIN_DIVISOR = 1e-12  # smallest value that a rule may divide by
MAX_COUNT = 2**53  # of samples and steps: larger integers are not exact in float64
MAX_SECONDS = 1e9

# By a rule's name of a field, the name of that field on the wire.
WIRE_NAMES = {"loss": "loss_before", "local_lr": "learning_rate"}
KNOWN_TO_SERVER = frozenset({"first_loss", "participations"})  # values that no client reports

RANGES: dict[str, tuple[float, float]] = {
    "samples": (1, MAX_COUNT),
    "loss_before": (-MAX_LOSS, MAX_LOSS),
    "loss_after": (-MAX_LOSS, MAX_LOSS),
    "initial_loss": (-MAX_LOSS, MAX_LOSS),
    "loss_standard_error": (0, MAX_LOSS),
    "gradient_norm": (0, MAX_LOSS),
    "steps": (0, MAX_COUNT),
    "learning_rate": (0, MAX_LEARNING_RATE),
    "seconds": (0, MAX_SECONDS),
    "planned_steps": (0, MAX_COUNT),
    "batch_size": (0, MAX_COUNT),
}


@dataclass(frozen=True)
class ReportRequirements:
    """The fields that a rule needs from every client, and the values that it can work with."""

    rule: str
    # Fields of TrainReport besides samples and losses, which every report has.
    fields: tuple[str, ...] = ()
    divisors: frozenset[str] = frozenset()  # fields that the rule divides by
    losses: str = "any"  # any, non_negative or positive
    measurement: LossMeasurement = "batches"  # the least exact one that suffices
    rule_loss: LossOfRule = "before"  # the loss that the rule receives
    reads_first_loss: bool = False  # which is a loss before training, whatever `rule_loss` is

    @classmethod
    def of_recipe(
        cls, recipe: Recipe, measurement: LossMeasurement, rule_loss: LossOfRule = "before"
    ) -> ReportRequirements:
        """Return the requirements of a federation's rule and of its settings."""
        plain = replace(cls.of(recipe.name, recipe.rule.needs()), measurement=measurement)
        if rule_loss == "before":
            return plain
        divisors = {"loss_after" if name == "loss_before" else name for name in plain.divisors}
        fields = (*plain.fields, "loss_after")
        return replace(plain, fields=fields, divisors=frozenset(divisors), rule_loss=rule_loss)

    @classmethod
    def of(cls, rule: str, needs: Needs) -> ReportRequirements:
        """Return the requirements of a rule with these needs."""
        fields = tuple(
            WIRE_NAMES.get(name, name) for name in needs.reports if name not in KNOWN_TO_SERVER
        )
        divisors = frozenset(WIRE_NAMES.get(name, name) for name in needs.positive)
        reads_first_loss = "first_loss" in needs.reports
        return cls(rule, fields, divisors, needs.losses, reads_first_loss=reads_first_loss)

    def check(self, report: TrainReport, *, wants_initial_loss: bool = False) -> None:
        """Raise BadReport, which names the field, if the rule cannot use this report.

        `wants_initial_loss` says whether the loss on the initial model is not known yet.
        """
        if problem := self.problem(report, wants_initial_loss=wants_initial_loss):
            raise BadReport(f"the training report is not usable: {problem}")

    def problem(self, report: TrainReport, *, wants_initial_loss: bool = False) -> str | None:
        """Return what is wrong with the report, or None; see `check`."""
        if problem := (
            self._missing(report) or self._out_of_range(report) or self._wrong_loss(report)
        ):
            return problem
        if wants_initial_loss and report.initial_loss is None:
            return (
                f"initial_loss is missing, and rule {self.rule} needs it of a client that did not "
                "train the initial model. Request a new task, which asks for it "
                "(TrainTask.initial_model)."
            )
        return None

    def _missing(self, report: TrainReport) -> str | None:
        for name in self.fields:
            if getattr(report, name) is None:
                if name == "loss_after":
                    return (
                        "loss_after is missing, and losses.rule: after gives it to the rule. Let "
                        "the task report it, or set losses.rule: before on the server."
                    )
                return (
                    f"{name} is missing, and rule {self.rule} needs it from every client. "
                    f"Let the task report {name}, or choose another rule on the server."
                )
        return None

    def _out_of_range(self, report: TrainReport) -> str | None:
        for name, (low, high) in RANGES.items():
            value, least = getattr(report, name), MIN_DIVISOR if name in self.divisors else low
            if value is not None and not least <= value <= high:
                return f"{name} is {value:g}; expected a value from {least:g} to {high:g}"
        return None

    def _wrong_loss(self, report: TrainReport) -> str | None:
        measured = report.loss_measurement
        if EXACTNESS.index(measured) < EXACTNESS.index(self.measurement):
            return (
                f"loss_measurement is {measured}, and this federation's rule or settings need a "
                f"loss that is {self.measurement}. Let the task measure it as Job.losses says."
            )
        condition = "above 0" if self.losses == "positive" else "of at least 0"
        for name, loss in self._losses_of(report).items():
            if loss is not None and not self._takes(loss):
                return (
                    f"{name} is {loss:g}, and rule {self.rule} is defined for losses {condition} "
                    "only. Add a constant to the task's loss, or choose a rule that takes any loss "
                    "(`fairfleet rules`)."
                )
        return None

    def _losses_of(self, report: TrainReport) -> dict[str, float | None]:
        """Return the losses that the rule may receive, by their names on the wire."""
        names = [f"loss_{self.rule_loss}", "initial_loss"]
        if self.reads_first_loss:
            names.append("loss_before")
        return {name: getattr(report, name) for name in names}

    def _takes(self, loss: float) -> bool:
        """Return whether the rule is defined for a loss."""
        return self.losses == "any" or loss > 0 or (loss == 0 and self.losses == "non_negative")
