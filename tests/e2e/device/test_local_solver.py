"""FedNova learns the clients' solver from the plan, and refuses one without a formula."""

from __future__ import annotations

import pytest

from tests.support.fleet import Fleet


def test_fednova_takes_the_momentum_of_the_plan(fleet: Fleet) -> None:
    fleet.init()
    plan = {"plan__steps": 12, "plan__batch_size": 10, "plan__momentum": 0.5}
    fleet.start_server(rule__name="fednova", rounds=1, exit_when_finished=True, **plan)
    fleet.start_client("able", task="walk", samples=20)
    fleet.start_client("busy", "--max-steps", "3", task="walk", samples=20)
    assert set(fleet.wait_clients().values()) == {0}
    [record] = fleet.records()
    # With momentum 1/2, the gradient of the i-th last step counts 2 - (1/2)^(i - 1) times.
    work = {"busy": 1 + 1.5 + 1.75, "able": sum(2 - 0.5**step for step in range(12))}
    effective = sum(work.values()) / 2
    weights = {part["client"]: part["weight"] for part in record["contributions"]}
    expected = {client: effective / (2 * done) for client, done in work.items()}
    assert weights == pytest.approx(expected)


def test_a_server_refuses_a_solver_that_the_rule_has_no_formula_for(fleet: Fleet) -> None:
    model = fleet.init()
    done = fleet.run(
        "server",
        *("--listen", fleet.address, "--state-dir", str(fleet.state), "--model", str(model)),
        *("--set", "rule.name=fednova", "--set", "plan.solver=adam"),
    )
    assert done.returncode != 0
    assert "fednova has no formula for the work of solver 'adam'" in done.stderr
    assert "Train with solver sgd" in done.stderr
    assert not fleet.state.exists()
