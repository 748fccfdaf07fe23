"""A report that a rule cannot use is refused by field name, before its update is accepted."""

from __future__ import annotations

import pytest

from fairfleet.common.errors import BadReport
from fairfleet.common.reports import TrainReport
from fairfleet.server.aggregation.report_requirements import ReportRequirements
from fairfleet.server.rules import Needs, Recipe, listings, recipe

GOOD = TrainReport(
    samples=10,
    loss_before=1.0,
    loss_after=0.5,
    steps=5,
    learning_rate=0.1,
    gradient_norm=2.0,
    accuracy=0.5,
)


def requirements(rule: str) -> ReportRequirements:
    return ReportRequirements.of(rule, recipe(rule).rule.needs())


@pytest.mark.parametrize("rule", sorted(listings()))
def test_a_complete_report_suits_every_rule(rule: str) -> None:
    requirements(rule).check(GOOD)


@pytest.mark.parametrize(
    ("rule", "field"), [("adafedadam", "gradient_norm"), ("fedfa", "accuracy")]
)
def test_a_missing_field_that_the_rule_needs_is_named(rule: str, field: str) -> None:
    with pytest.raises(BadReport, match=f"{field} is missing.*rule {rule} needs it"):
        requirements(rule).check(GOOD.model_copy(update={field: None}))
    requirements("fedavg").check(GOOD.model_copy(update={field: None}))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("samples", 0),
        ("samples", 2**63),
        ("loss_before", 1.7e308),
        ("loss_before", -1.7e308),
        ("loss_after", 1e31),
        ("gradient_norm", 1.7e308),
        ("learning_rate", 1e39),
        ("steps", 2**60),
    ],
)
def test_values_out_of_range_are_refused_by_name_whatever_the_rule(
    field: str, value: float
) -> None:
    with pytest.raises(BadReport, match=f"{field} is .*expected a value from"):
        requirements("fedavg").check(GOOD.model_copy(update={field: value}))


def test_a_value_that_the_rule_divides_by_must_not_be_zero() -> None:
    idle = GOOD.model_copy(update={"learning_rate": 0.0})
    ReportRequirements.of("mine", Needs()).check(idle)
    with pytest.raises(BadReport, match="learning_rate is 0"):
        ReportRequirements.of("mine", Needs(reports=("local_lr",), positive=("local_lr",))).check(
            idle
        )


def test_losses_that_the_rule_is_not_defined_for_are_refused_with_a_remedy() -> None:
    below = GOOD.model_copy(update={"loss_before": -0.5})
    ReportRequirements.of("mine", Needs()).check(below)
    with pytest.raises(BadReport, match=r"loss_before is -0.5.*at least 0.*Add a constant"):
        ReportRequirements.of("mine", Needs(losses="non_negative")).check(below)
    with pytest.raises(BadReport, match="losses above 0"):
        ReportRequirements.of("mine", Needs(losses="positive")).check(
            GOOD.model_copy(update={"loss_before": 0.0})
        )


def test_a_rule_that_receives_losses_after_training_needs_usable_ones() -> None:
    after = ReportRequirements.of_recipe(recipe("adafed"), "exact", "after")
    assert "loss_after" in after.fields
    after.check(GOOD.model_copy(update={"loss_before": -1.0}))
    with pytest.raises(BadReport, match=r"loss_after is missing.*losses\.rule: before"):
        after.check(GOOD.model_copy(update={"loss_after": None}))
    with pytest.raises(BadReport, match=r"loss_after is -0.5, and rule adafed"):
        after.check(GOOD.model_copy(update={"loss_after": -0.5}))


def test_first_losses_must_be_usable_although_the_rule_receives_losses_after_training() -> None:
    after = ReportRequirements.of_recipe(recipe("adafedadam"), "exact", "after")
    after.check(GOOD)
    for name in ("loss_before", "loss_after", "initial_loss"):
        with pytest.raises(BadReport, match=rf"{name} is -0.5, and rule adafedadam"):
            after.check(GOOD.model_copy(update={name: -0.5}))


def test_a_divisor_among_the_losses_is_the_one_that_the_rule_receives() -> None:
    needs = Needs(positive=("loss",))
    dividing = type("Dividing", (type(recipe("fedavg").rule),), {"needs": lambda self: needs})
    after = ReportRequirements.of_recipe(Recipe("mine", dividing()), "batches", "after")
    after.check(GOOD.model_copy(update={"loss_before": 0.0}))
    with pytest.raises(BadReport, match="loss_after is 0; expected a value from"):
        after.check(GOOD.model_copy(update={"loss_after": 0.0}))


def test_values_that_the_server_knows_are_not_required_of_clients() -> None:
    assert requirements("fedfa").fields == ("accuracy",)
    assert requirements("adafedadam").fields == ("gradient_norm", "learning_rate")


def test_a_missing_loss_on_the_initial_model_is_named_if_it_is_not_known_yet() -> None:
    of = requirements("adafedadam")
    of.check(GOOD)
    with pytest.raises(BadReport, match=r"initial_loss is missing.*rule adafedadam needs it"):
        of.check(GOOD, wants_initial_loss=True)
    of.check(GOOD.model_copy(update={"initial_loss": 2.0}), wants_initial_loss=True)
    with pytest.raises(BadReport, match="initial_loss is -1, and rule adafedadam is defined for"):
        of.check(GOOD.model_copy(update={"initial_loss": -1.0}), wants_initial_loss=True)
    with pytest.raises(BadReport, match=r"initial_loss is .*expected a value from"):
        of.check(GOOD.model_copy(update={"initial_loss": 1e31}))
