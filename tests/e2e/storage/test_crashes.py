"""The server is killed at every critical point; nothing acknowledged is lost or counted twice."""

from __future__ import annotations

import contextlib
import random
import sqlite3
import time
from collections.abc import Callable

import grpc
import numpy as np
import pytest

from fairfleet.proto.v1 import operator_pb2 as pb
from fairfleet.server.storage.schema import SCHEMA_VERSION
from tests.support.fleet import Fleet

KILLS = 200  # kills at random times, half of them for each durability
POINTS = {
    "transaction of new tables",
    "transaction of a new federation",
    "transaction of a boot",
    "fsync of .*safetensors.new",
    "fsync of models",
    r"fsync of \d{8}-[abc]\.",
    "fsync of uploads",
    r"fsync of [abc]@\d+\.npy\.new",
    "fsync of history",
    "transaction of a round",
    "what SendUpload did, before its answer",
    "what ReportEvaluation did, before its answer",
}


def history_agrees(fleet: Fleet) -> None:
    """Check that each row is the client's newest counted update, and that its file has it."""
    newest = dict(
        fleet.query("select client, max(round) from updates where file is null group by client")
    )
    assert dict(fleet.query("select client, round from history")) == newest
    for client, number in newest.items():
        row = np.load(fleet.state / "history" / f"{client}@{number}.npy", allow_pickle=False)
        np.testing.assert_allclose(row, fleet.options[client]["shift"], rtol=1e-5)


@pytest.mark.slow
def test_a_crash_after_any_durable_write_or_before_any_acknowledgement_loses_nothing(
    fleet: Fleet,
) -> None:
    settings = {
        "rule__name": "fedfv",
        "rule__tau": 2,
        "round__evaluate_every": 2,
        "lease_seconds": 5,
    }
    fleet.init()
    for name, shift in (("a", 1), ("b", 2), ("c", 4)):
        fleet.start_client(name, shift=shift)
    fleet.die_everywhere([*range(1, 45), *range(1, 45)], POINTS, rounds=10_000, **settings)
    rounds = fleet.version() + 3
    fleet.start_server(rounds=rounds, **settings)
    fleet.wait_for_version(rounds)
    assert set(fleet.wait_clients().values()) == {0}
    fleet.prove(rounds)
    history_agrees(fleet)


def die_at(fleet: Fleet, point: str, do: Callable[[], object] = lambda: None) -> None:
    """Kill the server at one point after another until this one; `do` runs while it serves."""
    for number in range(1, 20):
        fleet.start_server(die_at=number)
        assert fleet.server is not None
        assert fleet.server.stdout is not None
        if fleet.server.stdout.readline():  # the server serves
            do()
        assert fleet.server.wait(60) == -9
        if f"dying on purpose after: {point}\n" in fleet.log("server.log"):
            return
    raise AssertionError(f"never came to {point}")


@pytest.mark.slow
def test_a_migration_interrupted_after_any_step_is_completed_by_the_next_start(
    fleet: Fleet,
) -> None:
    fleet.init()
    fleet.start_server()
    fleet.stop_server()
    with contextlib.closing(sqlite3.connect(fleet.state / "federation.db")) as database, database:
        for table in ("history", "trials", "measures", "cut_off"):
            database.execute(f"DROP TABLE {table}")
        database.execute("UPDATE meta SET value = '1' WHERE key = 'schema_version'")
    for version in range(1, SCHEMA_VERSION):
        die_at(fleet, f"transaction of the migration from schema version {version}")
        assert fleet.query("SELECT value FROM meta WHERE key = 'schema_version'") == [
            (str(version + 1),)
        ]
    fleet.start_server()
    fleet.stop_server()
    assert fleet.run("server", "--check", "--state-dir", str(fleet.state)).returncode == 0


@pytest.mark.slow
def test_a_revocation_is_durable_before_it_takes_effect(fleet: Fleet) -> None:
    def revoke() -> None:
        with contextlib.suppress(grpc.RpcError):
            fleet.operator().Revoke(pb.RevokeRequest(client="mallory", reason="stolen"), timeout=20)

    fleet.init()
    fleet.start_server()
    fleet.stop_server()
    die_at(fleet, "transaction of a revocation", revoke)
    assert fleet.query("SELECT client, reason FROM revocations") == [("mallory", "stolen")]
    fleet.start_server()
    (client,) = fleet.operator().Clients(pb.ClientsRequest(), timeout=20)
    assert (client.client, client.state) == ("mallory", pb.CLIENT_STATE_REVOKED)


VERIFYING_POINTS = {
    "transaction of a round, now verifying",
    "transaction of a round, now committing",
    "what ReportVerification did, before its answer",
}


@pytest.mark.slow
@pytest.mark.parametrize("durability", ["update", "round"])
def test_a_crash_during_verification_loses_no_answer_and_takes_no_step_twice(
    fleet: Fleet, durability: str
) -> None:
    settings = {"rule__name": "fedfv", "rule__tau": 2, "lease_seconds": 5, "durability": durability}
    settings |= {
        "verification__halvings": 2,
        "verification__threshold": 1.0,
        "verification__deadline_seconds": 5,
    }
    fleet.init()
    for name, shift in (("a", 1), ("b", 2), ("c", 4)):
        fleet.start_client(name, shift=shift)
    fleet.die_everywhere(range(1, 35), VERIFYING_POINTS, rounds=10_000, **settings)
    rounds = fleet.version() + 3
    fleet.start_server(rounds=rounds, **settings)
    fleet.wait_for_version(rounds)
    assert set(fleet.wait_clients().values()) == {0}
    fleet.prove(rounds)
    assert {record["verification"]["factor"] for record in fleet.records()} == {1.0}
    answered = fleet.query("select round, client from trials order by round, client")
    if (
        durability == "update"
    ):  # otherwise other updates may arrive after a crash and lead to another step to try
        assert len(answered) == len(set(answered)), "no client was asked twice for the same step"


@pytest.mark.slow
@pytest.mark.parametrize("durability", ["update", "round"])
def test_kills_of_the_server_at_random_times_lose_nothing(fleet: Fleet, durability: str) -> None:
    draw = random.Random(7)  # the moments of the kills still differ between runs
    settings = {
        "rounds": 10_000,
        "round__quorum": 0.4,
        "lease_seconds": 2,
        "durability": durability,
    }
    fleet.init(100_000)
    fleet.start_server(**settings)
    for name, shift in (("a", 1), ("b", 2), ("c", 4)):
        fleet.start_client(name, shift=shift, steps=2, step_seconds=0.02)
    for _ in range(KILLS // 2):
        time.sleep(draw.uniform(0.05, 0.7))
        fleet.kill_server()
        fleet.start_server(**settings)
    rounds = fleet.version() + 3
    fleet.stop_server()
    fleet.start_server(**settings | {"rounds": rounds})
    fleet.wait_for_version(rounds, seconds=120)
    fleet.prove(rounds)
