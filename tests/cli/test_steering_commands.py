"""`pause`, `resume`, `stop`, `revoke`, `rounds` and `clients` against a real server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from fairfleet.proto.v1 import operator_pb2 as pb
from tests.e2e.fleet import Fleet, until


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Fleet]:
    fleet = Fleet(tmp_path)
    try:
        fleet.init()
        fleet.start_server(rounds=10_000, round__evaluate_every=2)
        for name in ("a", "b", "mallory"):
            fleet.start_client(name)
        fleet.wait_for_version(3)
        yield fleet
    finally:
        fleet.end()


def tell(fleet: Fleet, *words: str) -> CompletedProcess[str]:
    done = fleet.run(*words, "--server", fleet.address)
    assert done.returncode == 0, done.stderr
    return done


def test_an_operator_steers_a_federation_from_the_command_line(running: Fleet) -> None:
    assert "is out" in tell(running, "revoke", "mallory", "--reason", "sends nonsense").stdout
    assert running.clients["mallory"].wait(20) == 4
    running.wait_for_version(running.version() + 2)
    assert "paused at version" in tell(running, "pause").stdout
    until(lambda: running.status().phase == pb.PHASE_WAITING, "the round under way to end")
    version = running.version()
    rounds = [json.loads(line) for line in tell(running, "rounds", "--last", "2", "--json").stdout.splitlines()]
    assert [record["round"] for record in rounds] == [version - 2, version - 1]
    assert rounds[-1]["clients"] == ["a", "b"]
    assert rounds[-1]["rule"] == "fedavg"
    found = [json.loads(line) for line in tell(running, "clients", "--json").stdout.splitlines()]
    assert {record["client"]: record["state"] for record in found} == {"a": "idle", "b": "idle", "mallory": "revoked"}
    for command, shown in (("rounds", "improved"), ("clients", "mallory")):
        assert shown in tell(running, command).stdout
    assert running.version() == version  # nothing went on while it was paused
    tell(running, "resume")
    running.wait_for_version(version + 2)
    tell(running, "stop", "--reason", "enough")
    assert (running.clients["a"].wait(30), running.clients["b"].wait(30)) == (0, 0)


def test_a_server_that_is_not_there_is_said_so(tmp_path: Path) -> None:
    done = Fleet(tmp_path).run("pause", "--server", "127.0.0.1:1")
    assert done.returncode != 0
    assert "no FairFleet server answers at 127.0.0.1:1" in done.stderr
