"""The server dies at every point where dying could hurt, and nothing acknowledged is lost or counted twice."""

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
from fairfleet.server.schema import SCHEMA_VERSION
from tests.e2e.fleet import Fleet

KILLS = 200  # at random instants, half of them for each durability
POINTS = {
    "transaction of new tables",
    "transaction of a new federation",
    "transaction of a boot",
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
    fleet.die_everywhere([*range(1, 45), *range(1, 45)], POINTS, rounds=10_000, **settings)
    rounds = fleet.version() + 3
    fleet.start_server(rounds=rounds, **settings)
    fleet.wait_for_version(rounds)
    assert set(fleet.wait_clients().values()) == {0}
    fleet.prove(rounds)
    history_agrees(fleet)


def die_at(fleet: Fleet, point: str, do: Callable[[], object] = lambda: None) -> None:
    """Lets the server die at one point after another until this is the one; `do` it while it serves."""
    for number in range(1, 20):
        fleet.start_server(die_at=number)
        assert fleet.server is not None
        assert fleet.server.stdout is not None
        if fleet.server.stdout.readline():  # it serves
            do()
        assert fleet.server.wait(60) == -9
        if f"dying on purpose after: {point}\n" in fleet.log("server.log"):
            return
    raise AssertionError(f"never came to {point}")


@pytest.mark.slow
def test_a_migration_that_is_cut_short_after_any_of_its_steps_is_finished_by_the_next_start(fleet: Fleet) -> None:
    fleet.init()
    fleet.start_server()
    fleet.stop_server()
    with contextlib.closing(sqlite3.connect(fleet.state / "federation.db")) as database, database:
        for table in ("history", "trials", "measures", "cut_off"):
            database.execute(f"DROP TABLE {table}")
        database.execute("UPDATE meta SET value = '1' WHERE key = 'schema_version'")
    for version in range(1, SCHEMA_VERSION):
        die_at(fleet, f"transaction of the migration from schema version {version}")
        assert fleet.query("SELECT value FROM meta WHERE key = 'schema_version'") == [(str(version + 1),)]
    fleet.start_server()
    fleet.stop_server()
    assert fleet.run("server", "--check", "--state-dir", str(fleet.state)).returncode == 0


@pytest.mark.slow
def test_a_revocation_is_on_the_disk_before_anything_follows_from_it(fleet: Fleet) -> None:
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
def test_dying_while_a_step_is_tried_loses_no_answer_and_takes_no_step_twice(fleet: Fleet, durability: str) -> None:
    settings = {"rule__name": "fedfv", "rule__tau": 2, "lease_seconds": 5, "durability": durability}
    settings |= {"verification__halvings": 2, "verification__threshold": 1.0, "verification__deadline_seconds": 5}
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
    for _ in range(KILLS // 2):
        time.sleep(draw.uniform(0.05, 0.7))
        fleet.kill_server()
        fleet.start_server(**settings)
    rounds = fleet.version() + 3
    fleet.stop_server()
    fleet.start_server(**settings | {"rounds": rounds})
    fleet.wait_for_version(rounds, seconds=120)
    fleet.prove(rounds)
