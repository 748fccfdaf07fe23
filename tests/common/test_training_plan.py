"""Training plans give the right number of steps, and unusable values are refused."""

from __future__ import annotations

import pytest

from fairfleet.common import wire
from fairfleet.common.cli.settings import parse_assignment, read_model
from fairfleet.common.errors import BadRequest, BadSettings
from fairfleet.common.training_plan import MIN_FLOAT32, Plan
from fairfleet.proto.v1 import fleet_pb2 as pb


@pytest.mark.parametrize(
    ("plan", "samples", "steps"),
    [
        (Plan(), 100, 4),
        (Plan(), 97, 3),  # A last batch of one sample joins the previous one.
        (Plan(), 1, 1),
        (Plan(epochs=3, batch_size=10), 25, 9),
        (Plan(epochs=3, batch_size=0), 25, 3),
        (Plan(epochs=2, batch_size=1), 5, 10),
        (Plan(steps=7), 25, 7),
        (Plan(epochs=3), 0, 0),
    ],
)
def test_a_plan_gives_the_number_of_steps_of_a_client(plan: Plan, samples: int, steps: int) -> None:
    assert plan.steps_for(samples) == steps


def test_steps_can_be_set_over_the_defaults_written_out() -> None:
    """With `--set plan.steps=10`, the default of one epoch does not count as a second length."""
    assert Plan(**{**Plan().model_dump(), "steps": 10}).steps_for(100) == 10


def test_epochs_and_steps_together_are_refused() -> None:
    with pytest.raises(ValueError, match="found epochs 2 and steps 3"):
        Plan(epochs=2, steps=3)


@pytest.mark.parametrize(
    "name", ["learning_rate", "weight_decay", "proximal_mu", "personal_lambda"]
)
@pytest.mark.parametrize("value", ["1e39", "1.0e-50", ".inf", ".nan", "-1.0"])
def test_a_number_that_32_bit_floating_point_cannot_hold_is_a_mistake_in_the_settings(
    name: str, value: str
) -> None:
    with pytest.raises(BadSettings, match=f"1 mistake in the settings in flags:\n  {name}: "):
        read_model(Plan, None, dict([parse_assignment(f"{name}={value}")]))


@pytest.mark.parametrize("name", ["epochs", "steps", "batch_size"])
def test_a_count_that_the_wire_cannot_carry_is_a_mistake_in_the_settings(name: str) -> None:
    with pytest.raises(
        BadSettings, match=f"{name}: Input should be less than or equal to 4294967295"
    ):
        read_model(Plan, None, {name: 2**32})
    wire.plan_out(Plan(**{name: 2**32 - 1}))


def test_a_client_refuses_a_plan_that_32_bit_floating_point_cannot_hold() -> None:
    with pytest.raises(
        BadRequest, match=r"the server's plan is not usable: learning_rate: .* found 1e\+39"
    ):
        wire.plan_in(pb.Plan(epochs=1, learning_rate=1e39, solver=pb.SOLVER_SGD))


def test_clients_receive_the_decayed_rate_of_their_round() -> None:
    plan = Plan(learning_rate=0.1, learning_rate_decay=0.999)
    for round_number in (0, 1, 2000):
        received = wire.plan_in(wire.plan_out(plan.for_client("ann", round_number)))
        assert received.learning_rate == 0.1 * 0.999**round_number
        assert received.learning_rate_decay == 1.0
        assert received.seed == plan.for_client("ann", round_number).seed


def test_a_rate_never_decays_below_what_a_client_accepts() -> None:
    plan = Plan(learning_rate=0.1, learning_rate_decay=0.5).for_client("ann", 5000)
    assert wire.plan_in(wire.plan_out(plan)).learning_rate == MIN_FLOAT32


@pytest.mark.parametrize("value", ["0", "-0.5", "1.001", ".nan"])
def test_a_decay_is_above_0_and_at_most_1(value: str) -> None:
    with pytest.raises(BadSettings, match="learning_rate_decay: "):
        read_model(Plan, None, dict([parse_assignment(f"learning_rate_decay={value}")]))
