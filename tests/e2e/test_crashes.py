"""The server dies at every point where dying could hurt, and nothing acknowledged is lost or counted twice."""

from __future__ import annotations

import random
import re
import time

import numpy as np
import pytest

from tests.e2e.fleet import Fleet

POINTS = {
    "fsync of .*safetensors.new",
    "fsync of models",
    r"fsync of \d{8}-[abc]\.",
    "fsync of uploads",
    r"fsync of \.[abc]\.part",
    "fsync of history",
    "transaction of a round",
    "what SendUpload did, before its answer",
    "what ReportEvaluation did, before its answer",
}


def history_agrees(fleet: Fleet) -> None:
    """Every row is the client's newest counted update, and its file holds that update."""
    newest = dict(fleet.query("select client, max(round) from updates where file is null group by client"))
    assert dict(fleet.query("select client, round from history")) == newest
    for client, number in newest.items():
        row = np.load(fleet.state / "history" / f"{client}@{number}.npy", allow_pickle=False)
        np.testing.assert_allclose(row, fleet.options[client]["shift"], rtol=1e-5)


@pytest.mark.slow
def test_dying_after_every_durable_write_and_before_every_acknowledgement_loses_nothing(fleet: Fleet) -> None:
    settings = {"rule__name": "fedfv", "rule__tau": 2, "round__evaluate_every": 2, "lease_seconds": 5}
    fleet.init()
    for name, shift in (("a", 1), ("b", 2), ("c", 4)):
        fleet.start_client(name, shift=shift)
    for die_at in [*range(1, 45), *range(1, 45)]:
        fleet.start_server(die_at=die_at, rounds=10_000, **settings)
        assert fleet.server is not None
        assert fleet.server.wait(60) == -9
    log = fleet.log("server.log")
    died_at = re.findall("dying on purpose after: (.*)", log)
    assert len(died_at) == 88
    assert [point for point in POINTS if not any(re.match(point, where) for where in died_at)] == []
    rounds = fleet.version() + 3
    fleet.start_server(rounds=rounds, **settings)
    fleet.wait_for_version(rounds)
    assert set(fleet.wait_clients().values()) == {0}
    fleet.prove(rounds)
    history_agrees(fleet)


VERIFYING_POINTS = {
    "transaction of a round, now verifying",
    "transaction of a round, now committing",
    "what ReportVerification did, before its answer",
}


@pytest.mark.slow
@pytest.mark.parametrize("durability", ["update", "round"])
def test_dying_while_a_step_is_tried_loses_no_answer_and_takes_no_step_twice(fleet: Fleet, durability: str) -> None:
    settings = {"rule__name": "fedfv", "rule__tau": 2, "lease_seconds": 5, "durability": durability}
    settings |= {"verification__halvings": 2, "verification__threshold": 1.0, "verification__deadline_seconds": 5}
    fleet.init()
    for name, shift in (("a", 1), ("b", 2), ("c", 4)):
        fleet.start_client(name, shift=shift)
    died_at: set[str] = set()
    for die_at in [*range(1, 35), *range(1, 120)]:  # where a number leads depends on how clients come back
        fleet.start_server(die_at=die_at, rounds=10_000, **settings)
        assert fleet.server is not None
        assert fleet.server.wait(60) == -9
        died_at |= set(re.findall("dying on purpose after: (.*)", fleet.log("server.log")))
        if died_at >= VERIFYING_POINTS and die_at >= 34:
            break
    assert died_at >= VERIFYING_POINTS
    rounds = fleet.version() + 3
    fleet.start_server(rounds=rounds, **settings)
    fleet.wait_for_version(rounds)
    assert set(fleet.wait_clients().values()) == {0}
    fleet.prove(rounds)
    assert {record["verification"]["factor"] for record in fleet.records()} == {1.0}
    answered = fleet.query("select round, client from trials order by round, client")
    if durability == "update":  # else other updates may come after a crash, and with them another step to try
        assert len(answered) == len(set(answered)), "nobody was asked twice for the same step"


@pytest.mark.slow
@pytest.mark.parametrize("durability", ["update", "round"])
def test_kills_of_the_server_at_random_instants_lose_nothing(fleet: Fleet, durability: str) -> None:
    draw = random.Random(7)  # the instants still differ from run to run: the machine is never the same
    settings = {"rounds": 10_000, "round__quorum": 0.4, "lease_seconds": 2, "durability": durability}
    fleet.init(100_000)
    fleet.start_server(**settings)
    for name, shift in (("a", 1), ("b", 2), ("c", 4)):
        fleet.start_client(name, shift=shift, steps=2, step_seconds=0.02)
    for _ in range(60):
        time.sleep(draw.uniform(0.05, 1.0))
        fleet.kill_server()
        fleet.start_server(**settings)
    rounds = fleet.version() + 3
    fleet.stop_server()
    fleet.start_server(**settings | {"rounds": rounds})
    fleet.wait_for_version(rounds, seconds=120)
    fleet.prove(rounds)
