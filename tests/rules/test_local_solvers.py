"""FedNova's measure of local work is that of the solver in the plan."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairfleet.client.training.numpy_solvers import Descent
from fairfleet.common.training_plan import Plan
from fairfleet.server.rules import RuleError, recipe
from fairfleet.server.rules.weights.fednova import FedNova, proximal_work


def planned(rule: dict[str, Any] | None = None, **plan: Any) -> FedNova:
    """Return FedNova with these parameters, for clients with this plan."""
    built = recipe("fednova", **(rule or {})).for_plan(Plan(**plan)).rule
    assert isinstance(built, FedNova)
    return built


def distance(plan: Plan, steps: int) -> float:
    """Return how far the client's solver goes in constant gradients of 1, in learning rates."""
    parameters = np.zeros(1, np.float64)
    descent = Descent(plan, parameters, parameters)
    for _ in range(steps):
        descent.step(np.ones(1))
    return float(-parameters[0] / plan.learning_rate)


@given(
    st.integers(1, 30),
    st.sampled_from([{}, {"momentum": 0.9}, {"momentum": 0.5, "nesterov": True}]),
)
def test_the_work_is_how_far_the_clients_solver_goes_in_constant_gradients(
    steps: int, solver: dict[str, Any]
) -> None:
    plan = Plan(steps=steps, learning_rate=0.1, **solver)
    work = planned(**solver).work(np.array([float(steps)]))
    assert work[0] == pytest.approx(distance(plan, steps), rel=1e-6)


@given(st.integers(1, 30))
def test_a_proximal_term_uses_the_plans_mu_and_the_reported_rates(steps: int) -> None:
    plan = Plan(steps=steps, learning_rate=0.1, proximal_mu=2.0)
    rule = planned(steps=steps, learning_rate=0.1, proximal_mu=2.0)
    assert rule.needs().reports == ("steps", "local_lr")
    assert rule.needs().positive == ("local_lr",)
    work = proximal_work(np.array([float(steps)]), np.array([0.2]))
    assert work[0] == pytest.approx(distance(plan, steps), rel=1e-6)


def test_parameters_that_are_given_win_over_the_plan() -> None:
    rule = planned({"momentum": 0.5}, momentum=0.9)
    assert rule.momentum == 0.5
    assert planned({"lr_mu": 0.3}, proximal_mu=5.0).needs().reports == ("steps",)
    assert planned(momentum=0.9, nesterov=True).nesterov


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"solver": "adam"}, "no formula for the work of solver 'adam'"),
        ({"momentum": 0.9, "proximal_mu": 0.1}, "momentum 0.9 together with a proximal term"),
    ],
)
def test_a_solver_without_a_formula_is_refused_with_the_remedy(
    plan: dict[str, Any], message: str
) -> None:
    with pytest.raises(RuleError, match=message) as caught:
        planned(**plan)
    assert "Train with solver sgd" in str(caught.value)


def test_other_rules_take_every_plan() -> None:
    plan = Plan(solver="adam")
    assert recipe("fedavg").for_plan(plan) == recipe("fedavg")
