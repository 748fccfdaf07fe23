"""`pause`, `resume`, `stop`, `revoke`, `rounds` and `clients` against a real server."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from subprocess import PIPE, CompletedProcess

import pytest

from fairfleet.proto.v1 import operator_pb2 as pb
from tests.support.fleet import HERE, PROGRAM, Fleet, until


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


def command(fleet: Fleet, *words: str) -> CompletedProcess[str]:
    done = fleet.run(*words, "--server", fleet.address)
    assert done.returncode == 0, done.stderr
    return done


def test_an_operator_controls_a_federation_from_the_command_line(running: Fleet) -> None:
    revoked = command(running, "revoke", "mallory", "--reason", "sends nonsense")
    assert revoked.stdout == "Revoked client mallory.\n"
    assert running.clients["mallory"].wait(20) == 4
    running.wait_for_version(running.version() + 2)
    assert "paused at version" in command(running, "pause").stdout
    until(lambda: running.status().phase == pb.PHASE_WAITING, "the end of the current round")
    version = running.version()
    rounds = [
        json.loads(line)
        for line in command(running, "rounds", "--last", "2", "--json").stdout.splitlines()
    ]
    assert [record["round"] for record in rounds] == [version - 2, version - 1]
    assert rounds[-1]["clients"] == ["a", "b"]
    assert rounds[-1]["rule"] == "fedavg"
    clients = [
        json.loads(line) for line in command(running, "clients", "--json").stdout.splitlines()
    ]
    assert {record["client"]: record["state"] for record in clients} == {
        "a": "idle",
        "b": "idle",
        "mallory": "revoked",
    }
    for name, text in (("rounds", "improved"), ("clients", "mallory")):
        assert text in command(running, name).stdout
    assert running.version() == version  # no round ran while it was paused
    command(running, "resume")
    running.wait_for_version(version + 2)
    command(running, "stop", "--yes", "--reason", "enough")
    assert (running.clients["a"].wait(30), running.clients["b"].wait(30)) == (0, 0)


def answered(fleet: Fleet, answer: bytes | int) -> int:
    """Return how `fairfleet stop` ends when a person at a terminal gives this answer, or signal."""
    own, other = pty.openpty()
    words = [*PROGRAM, "stop", "--server", fleet.address]
    asking = subprocess.Popen(words, stdin=other, stdout=PIPE, stderr=other, cwd=HERE)
    os.close(other)
    try:
        said = b""
        while b"[y/N]" not in said:
            said += os.read(own, 1000)
        if isinstance(answer, bytes):
            os.write(own, answer)
        else:
            asking.send_signal(answer)
        return asking.wait(20)
    finally:
        asking.kill()
        asking.communicate()
        os.close(own)


def test_stop_asks_a_person_at_a_terminal(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path)
    try:
        fleet.init()
        fleet.start_server(rounds=3)
        end_of_input = b"\x04"  # Ctrl-D
        for answer, exit_code in ((b"n\n", 2), (end_of_input, 2), (signal.SIGINT, 130)):
            assert answered(fleet, answer) == exit_code
            assert fleet.status().phase != pb.PHASE_FINISHED
        assert answered(fleet, b"y\n") == 0
        assert fleet.status().phase == pb.PHASE_FINISHED
    finally:
        fleet.end()


def test_a_missing_server_is_reported(tmp_path: Path) -> None:
    done = Fleet(tmp_path).run("pause", "--server", "127.0.0.1:1")
    assert done.returncode != 0
    assert "no FairFleet server answers at 127.0.0.1:1" in done.stderr
