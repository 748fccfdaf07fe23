"""Clients that do less than the plan report it, and rules that need the work done use it."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from fairfleet.client.operator.connection import OperatorConnection
from fairfleet.common.net.server_access import ServerAccess
from tests.support.fleet import Fleet

PLAN = {"plan__steps": 12, "plan__batch_size": 10, "round__minimum_clients": 4, "rounds": 2}


def run(fleet: Fleet, rule: str) -> list[dict[str, Any]]:
    """Run two rounds of four clients with equal data and shift; each has another small budget."""
    fleet.init()
    fleet.start_server(rule__name=rule, exit_when_finished=True, **PLAN)
    walks = {"task": "walk", "shift": 0.5, "samples": 20}
    fleet.start_client("able", **walks)
    fleet.start_client("busy", "--max-steps", "3", **walks)
    fleet.start_client("slow", "--max-seconds", "0.25", step_seconds=0.1, **walks)
    fleet.start_client("tiny", "--max-memory-mb", "4", **walks)
    assert set(fleet.wait_clients().values()) == {0}
    return fleet.records()


@pytest.mark.slow
def test_fednova_weighs_each_client_by_the_work_it_did(fleet: Fleet) -> None:
    expected = 0.0
    for record in run(fleet, "fednova"):
        reports = {part["client"]: part["report"] for part in record["contributions"]}
        steps = {client: report["steps"] for client, report in reports.items()}
        assert (steps["able"], steps["busy"], steps["tiny"]) == (12, 3, 12)
        assert 1 <= steps["slow"] < 12
        assert {client: tuple(report["cut_by"]) for client, report in reports.items()} == {
            "able": (),
            "busy": ("steps",),
            "slow": ("seconds",),
            "tiny": ("memory",),
        }
        assert {report["planned_steps"] for report in reports.values()} == {12}
        assert (reports["able"]["batch_size"], reports["tiny"]["batch_size"]) == (10, 4)
        effective = np.mean(list(steps.values()))
        weights = {part["client"]: part["weight"] for part in record["contributions"]}
        assert weights == pytest.approx(
            {client: effective / (4 * step_count) for client, step_count in steps.items()}
        )
        expected += (
            0.5 * effective
        )  # every client moves equally far per step, so the mean step equals that of each
    np.testing.assert_allclose(fleet.model(2).parameters, -expected, rtol=1e-5)


@pytest.mark.slow
def test_adafedadam_normalises_by_the_distance_each_client_moved(fleet: Fleet) -> None:
    for record in run(fleet, "adafedadam"):
        steps = {part["client"]: part["report"]["steps"] for part in record["contributions"]}
        weights = {part["client"]: part["weight"] for part in record["contributions"]}
        assert weights["busy"] / weights["able"] == pytest.approx(12 / 3, rel=1e-5)
        assert weights["slow"] / weights["able"] == pytest.approx(12 / steps["slow"], rel=1e-5)


@pytest.mark.slow
def test_an_operator_sees_which_clients_did_less(fleet: Fleet) -> None:
    fleet.init()
    fleet.start_server(**PLAN | {"rounds": 10_000, "round__minimum_clients": 2})
    fleet.start_client("able", task="walk")
    fleet.start_client("busy", "--max-steps", "3", task="walk")
    fleet.wait_for_version(2)
    asked = fleet.run("rounds", "--last", "1", "--json", "--server", fleet.address)
    less = {"steps": 3, "planned_steps": 12, "batch_size": 10, "cut_by": ["steps"]}
    assert json.loads(asked.stdout)["did_less"] == {"busy": less}
    shown = fleet.run("rounds", "--server", fleet.address).stdout
    assert "less" in shown
    assert "busy" in shown
    with OperatorConnection(
        ServerAccess(fleet.address)
    ) as link:  # rounds go on between its two questions
        assert {len(link.rounds(1)) for _ in range(100)} == {1}


def test_an_impossible_budget_is_refused_at_start(fleet: Fleet) -> None:
    done = fleet.run(
        "client", "--task", "tasks:shift", "--max-memory-mb", "10", "--state-dir", str(fleet.folder)
    )
    assert done.returncode == 2
    assert "ShiftTask cannot keep to a memory budget" in done.stderr
    done = fleet.run("client", "--task", "tasks:shift", "--max-steps", "0")
    assert done.returncode == 2
    assert "budget.steps" in done.stderr
