"""Server and clients of commit 21fd73f work together with those of this version.

The old version is installed in an environment of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
from collections import Counter
from collections.abc import Callable, Mapping
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fairfleet.proto.v1 import operator_pb2 as op
from tests.support.fleet import PATIENCE_SECONDS, Fleet, Installation, until
from tests.support.paths import ROOT

pytestmark = pytest.mark.slow

COMMIT = "21fd73f"  # before the server validated reports, quarantined updates and enforced codecs
INSTALL_SECONDS = 600
SETTINGS: dict[str, Any] = {
    "rounds": 1000,
    "round__minimum_clients": 3,
    "round__quorum": 1.0,
    "round__evaluate_every": 2,
    "lease_seconds": 30,
}


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Installation:
    folder = tmp_path_factory.mktemp("old")
    with tarfile.open(fileobj=BytesIO(archived(COMMIT))) as archive:
        archive.extractall(folder, filter="data")
    installation = Installation(folder / "environment" / "bin" / "python", folder / "tests" / "e2e")
    install(installation, folder)
    code = "import fairfleet.server.round_loop"  # this version has no such module
    done = subprocess.run(
        [installation.python, "-c", code],
        env=os.environ | installation.environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, f"it is not the old version: {done.stderr}"
    return installation


def archived(commit: str) -> bytes:
    """Return the sources of an earlier commit as a tar file; skip the test without that commit."""
    try:
        done = subprocess.run(
            ["git", "-C", ROOT, "archive", commit], capture_output=True, timeout=60, check=False
        )
    except OSError as error:
        pytest.skip(f"git cannot be run: {error}")
    if done.returncode:
        pytest.skip(f"commit {commit} is not in the history here: {done.stderr.decode().strip()}")
    return done.stdout


def install(installation: Installation, source: Path) -> None:
    """Install a version with its own constraints; skip the test if pip cannot get its packages."""
    constraints, extras = (
        source / "constraints.txt",
        f"{source}[server]",
    )  # the tasks of these tests need no torch
    pip = [
        installation.python,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
        "-c",
        constraints,
        extras,
    ]
    for command in ([sys.executable, "-m", "venv", source / "environment"], pip):
        environment = os.environ | installation.environment
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=INSTALL_SECONDS
        )
        if done.returncode:
            reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
            pytest.skip(f"an environment with commit {COMMIT} cannot be installed here: {reason}")


def start_clients(fleet: Fleet, clients: Mapping[str, Installation | None], **options: Any) -> None:
    for name, installation in clients.items():
        if installation:
            fleet.installations[name] = installation
        fleet.start_client(name, **options)


def operate(fleet: Fleet, installation: Installation | None) -> None:
    """Pause a federation, read its status and resume it, with the commands of one version."""

    def run(*words: str) -> str:
        done = fleet.run(*words, "--server", fleet.address, installation=installation)
        assert done.returncode == 0, done.stderr
        return done.stdout

    run("pause")
    # The round under way is finished first, and the status shows it meanwhile.
    until(lambda: "paused" in run("status"), "the federation to be paused")
    assert json.loads(run("status", "--json"))["paused"]
    assert len(run("clients", "--json").splitlines()) == len(fleet.clients)
    records = [json.loads(line) for line in run("rounds", "--json").splitlines()]
    assert [record["clients"] for record in records] == [sorted(fleet.clients)] * len(records)
    assert "received" in run("rounds")
    watch(fleet, "new" if installation is None else "old", lambda: run("resume"))


def watch(fleet: Fleet, operator: str, resume: Callable[[], object]) -> None:
    """Follow a paused federation from another process until a round is committed and evaluated."""
    watching = fleet.start_command(operator, "watch", "--json")
    assert watching.stdout is not None
    assert json.loads(watching.stdout.readline())  # the status of the federation
    resume()
    awaited = {"round_committed", "evaluation_finished"}
    for line in watching.stdout:
        awaited.discard(json.loads(line)["kind"])
        if not awaited:
            break
    assert watching.poll() is None, fleet.log(f"{operator}.log")
    watching.kill()
    assert not fleet.log(f"{operator}.log")


def check_complete(fleet: Fleet, rounds: int) -> None:
    """Check that every round has all updates, and that every client evaluated with a result."""
    records, names = fleet.records(), sorted(fleet.clients)
    assert [record["round"] for record in records] == list(range(rounds))
    assert all(sorted(c["client"] for c in record["contributions"]) == names for record in records)
    evaluations = fleet.query("select version, client, failure from evaluations")
    assert {failure for _, _, failure in evaluations} <= {
        "",
        "it was gone",
    }  # while the server was restarted
    results = [(version, client) for version, client, failure in evaluations if not failure]
    assert {version for version, _ in results} == {*range(2, rounds, 2), rounds}
    assert all(count > 1 for count in Counter(client for _, client in results).values())
    assert {client for _, client in results} == set(names)
    assert np.isfinite(fleet.model(rounds).parameters).all()


@pytest.mark.parametrize("codec", ["int8", "topk:0.25"])
@pytest.mark.parametrize("server", ["old", "new"])
def test_server_and_clients_of_both_versions_train_together_over_a_restart(
    old: Installation, fleet: Fleet, server: str, codec: str
) -> None:
    """Use compression, prediction if the codec has it, evaluations, and operators of both."""
    fleet.init()
    if server == "old":
        fleet.installations["server"] = old
    fleet.installations["old"] = old  # an operator
    fleet.start_server(**SETTINGS, codec=codec)
    start_clients(
        fleet, {"ann": old, "bob": old if server == "new" else None, "eve": None}, step_seconds=0.1
    )
    fleet.wait_for_version(2)
    for installation in (old, None):
        operate(fleet, installation)
    fleet.wait_for_version(fleet.version() + 1)
    fleet.kill_server()
    last = fleet.version() + 5
    fleet.start_server(**SETTINGS | {"rounds": last, "codec": codec})
    assert set(fleet.wait_clients().values()) == {0}
    check_complete(fleet, last)
    predicting = {
        client for (client,) in fleet.query("select client from updates where base is not null")
    }
    assert predicting == (set(fleet.clients) if codec.startswith("topk") else set())


def test_a_federation_is_upgraded_in_mid_round(old: Installation, fleet: Fleet) -> None:
    """Upgrade the server on its old state directory first, then a client on its own."""
    fleet.init()
    fleet.installations["server"] = old
    fleet.start_server(**SETTINGS)
    start_clients(fleet, {"ann": old, "bob": old, "eve": None}, step_seconds=0.2)
    fleet.wait_for_version(3)
    until(
        lambda: fleet.query("select client from updates where file is not null"),
        "an update of the next round",
    )
    fleet.kill_server()
    del fleet.installations["server"]
    fleet.start_server(**SETTINGS)
    fleet.wait_for_version(6)
    fleet.kill_client("bob")
    del fleet.installations["bob"]
    fleet.start_client("bob", step_seconds=0.2)
    fleet.wait_for_version(8)
    fleet.kill_server()
    last = fleet.version() + 2
    fleet.start_server(**SETTINGS | {"rounds": last})
    assert set(fleet.wait_clients().values()) == {0}
    check_complete(fleet, last)
    fleet.prove(last)


@pytest.mark.parametrize(
    ("rule", "task", "options", "field"),
    [
        pytest.param(
            {"rule__name": "adafedadam", "rule__reference": "first"},
            "walk",
            {},
            "gradient_norm is missing",
            id="no gradient norm",
        ),
        pytest.param(
            {"rule__name": "fedlf"},
            "shift",
            {"loss": -1},
            "loss_before is -1",
            id="a negative loss",
        ),
    ],
)
def test_a_refused_old_client_exits_with_the_reason_and_affects_no_other_client(
    old: Installation,
    fleet: Fleet,
    rule: dict[str, str],
    task: str,
    options: dict[str, Any],
    field: str,
) -> None:
    """An old client treats a refusal as a failure of its task.

    Each ends its part in the round, and three in a row end the client.
    """
    fleet.init()
    settings = {
        "rounds": 12,
        "round__minimum_clients": 2,
        "round__quorum": 0.5,
        "exit_when_finished": True,
    }
    fleet.start_server(**SETTINGS | settings | rule)
    fleet.operator().Pause(op.PauseRequest())  # until all three are connected
    start_clients(fleet, {"refused": old}, **options)
    start_clients(fleet, {"ann": None, "bob": old}, task=task, step_seconds=0.1)
    until(lambda: fleet.status().connected == 3, "all to be there")
    fleet.operator().Resume(op.ResumeRequest())
    codes = fleet.wait_clients()
    assert codes == {"refused": 1, "ann": 0, "bob": 0}
    log = fleet.log("refused.log")
    assert "the task failed 3 times in a row" in log
    assert field in log
    assert "choose" in log  # the remedy
    assert fleet.server is not None
    assert fleet.server.wait(PATIENCE_SECONDS) == 0
    records = fleet.records()
    assert len(records) == 12
    assert all(
        sorted(c["client"] for c in record["contributions"]) == ["ann", "bob"] for record in records
    )
