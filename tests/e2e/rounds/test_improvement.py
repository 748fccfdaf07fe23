"""The effect of steps on losses, as a real federation reports it, from updates alone."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.fleet import Fleet, free_port, until
from tests.support.scraping import scrape, series


def told(fleet: Fleet) -> list[dict[str, Any]]:
    done = fleet.run("rounds", "--json", "--last", "10000", "--server", fleet.address)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize(
    ("stride", "other", "promised", "improved"),
    [
        (0.5, 1.5, 1.0, 1.0),
        (
            3.0,
            1.5,
            1.0,
            0.0,
        ),  # every slope predicts a decrease, but the step is too long and every loss rises
        (0.5, -5.0, 0.5, 0.5),
    ],
)
def test_predicted_and_measured_changes_are_reported_separately(
    fleet: Fleet, stride: float, other: float, promised: float, improved: float
) -> None:
    port = free_port()
    fleet.init(task="quadratic")
    fleet.start_server(rounds=2, http__port=port)
    for name, target in (("a", 1.0), ("b", other)):
        fleet.start_client(name, task="quadratic", target=target, stride=stride)
    fleet.wait_for_version(2)
    assert set(fleet.wait_clients().values()) == {0}
    first, last = told(fleet)
    assert (first["promised"], first["measured"]) == (
        promised,
        {"improved": improved, "clients": 2, "strictly_improved": improved},
    )
    assert (last["measured"], last["verification"]) == (None, None)  # no client has reported since
    metrics = scrape(port)
    assert metrics[series("fairfleet_step_improved_clients_ratio")] == improved
    assert metrics[series("fairfleet_step_strictly_improved_clients_ratio")] == improved
    table = fleet.run("rounds", "--server", fleet.address).stdout
    assert f"{improved:.0%} of 2" in table
    assert "…" not in table, "it must fit into 80 columns"


@pytest.mark.slow
def test_a_client_that_missed_the_deadline_is_measured_at_its_next_report(fleet: Fleet) -> None:
    fleet.init()
    patience = {
        "round__deadline_seconds": 2,
        "round__quorum": 0.6,
        "round__minimum_clients": 3,
        "lease_seconds": 60,
    }
    fleet.start_server(rounds=10_000, **patience)
    for name, trouble in (("a", "none"), ("b", "none"), ("slow", "hang")):
        fleet.start_client(name, trouble=trouble)
    fleet.wait_for_version(1)
    assert told(fleet)[0]["cut_off"] == [{"client": "slow"}]  # its loss was unknown
    fleet.kill_client("slow")
    fleet.start_client("slow")
    until(
        lambda: fleet.query("select 1 from cut_off where loss_after is not null"), "its next report"
    )
    report = told(fleet)
    back = next(record["round"] for record in report if "slow" in record["clients"])
    assert report[0]["cut_off"] == [{"client": "slow", "loss_after": 1.0, "round_after": back}]
