from __future__ import annotations

import pytest

from fairfleet.common.plan import Plan


@pytest.mark.parametrize(
    ("plan", "samples", "steps"),
    [
        (Plan(), 100, 4),
        (Plan(), 97, 3),  # the last batch would be of one sample, and joins the one before
        (Plan(), 1, 1),
        (Plan(epochs=3, batch_size=10), 25, 9),
        (Plan(epochs=3, batch_size=0), 25, 3),
        (Plan(epochs=2, batch_size=1), 5, 10),
        (Plan(steps=7), 25, 7),
        (Plan(epochs=3), 0, 0),
    ],
)
def test_a_plan_means_so_many_steps_for_a_client(plan: Plan, samples: int, steps: int) -> None:
    assert plan.steps_for(samples) == steps


def test_steps_can_be_set_over_the_defaults_written_out() -> None:
    """As `--set plan.steps=10` does: the default of one epoch is no second length."""
    assert Plan(**{**Plan().model_dump(), "steps": 10}).steps_for(100) == 10


def test_epochs_and_steps_together_are_refused() -> None:
    with pytest.raises(ValueError, match="found epochs 2 and steps 3"):
        Plan(epochs=2, steps=3)
