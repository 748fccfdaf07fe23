"""The client in Node.js decodes the test vectors and passes the levels that it claims."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.support.fleet import PATIENCE_SECONDS, PROGRAM, free_port
from tests.support.paths import ROOT

SOURCE = ROOT / "examples" / "client-node"
LEVELS = ("basic", "compressed")
# Without a network, npm gives up at once.
INSTALL = ["npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund", "--prefer-offline"]
NO_RETRIES = ["--fetch-retries=0", "--fetch-timeout=10000"]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the client with its packages; skip if they cannot be installed."""
    if not (shutil.which("node") and shutil.which("npm")):
        pytest.skip("Node.js is not installed: this machine has no node or no npm")
    folder = tmp_path_factory.mktemp("node") / "client-node"
    shutil.copytree(SOURCE, folder)
    if not (folder / "node_modules").exists():
        done = subprocess.run(
            [*INSTALL, *NO_RETRIES], cwd=folder, text=True, capture_output=True, check=False
        )
        if done.returncode:
            pytest.skip(f"npm cannot install the client's packages: {done.stderr[-300:]}")
    return folder


def environment() -> dict[str, str]:
    return os.environ | {"FAIRFLEET_PROTO": str(ROOT / "proto")}


def test_it_reads_the_test_vectors(client: Path) -> None:
    done = subprocess.run(
        ["node", "--test"],
        cwd=client,
        env=environment(),
        text=True,
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert "# fail 0" in done.stdout
    assert "# pass 7" in done.stdout


def check(client: Path, *levels: str) -> tuple[dict[str, Any], str, int | None]:
    """Return what `fairfleet conformance` finds, and the client's log and exit code."""
    address = f"127.0.0.1:{free_port()}"
    words = ["conformance", "--listen", address, "--json", "--seconds", "20"]
    words += [word for level in levels for word in ("--level", level)]
    server = subprocess.Popen(
        [*PROGRAM, *words], text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert server.stderr is not None
    assert server.stderr.readline().startswith("listening on")
    with subprocess.Popen(
        ["node", "client.mjs", "--server", address, "--name", "node-1"],
        cwd=client,
        env=environment(),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    ) as process:
        try:
            output, errors = server.communicate(timeout=4 * PATIENCE_SECONDS)
        finally:
            server.kill()
            process.terminate()
        log, _ = process.communicate(timeout=PATIENCE_SECONDS)
    assert output, errors
    return json.loads(output), log, process.returncode


def failed(outcome: dict[str, Any]) -> list[str]:
    return [
        entry["check"]
        for level in outcome["levels"].values()
        for entry in level["checks"]
        if entry["result"] == "fail"
    ]


def test_it_passes_the_levels_basic_and_compressed(client: Path) -> None:
    outcome, log, exit_code = check(client, *LEVELS)
    assert outcome["passed"], (failed(outcome), log)
    assert tuple(outcome["levels"]) == LEVELS
    assert exit_code == 1, "it stops by itself, with an error"
    assert "another process joined as node-1" in log


def changed(client: Path, folder: Path, changes: dict[str, tuple[str, str]]) -> Path:
    """Return a copy of the client in which one text of each file is replaced."""
    shutil.copytree(client, folder, symlinks=True)
    for name, (before, after) in changes.items():
        text = (folder / name).read_text()
        assert text.count(before) == 1, (name, before)
        (folder / name).write_text(text.replace(before, after))
    return folder


def test_clients_with_mistakes_fail_the_check_of_each_mistake(client: Path, tmp_path: Path) -> None:
    changes = {
        "session.mjs": ("      case status.ABORTED:\n", ""),
        "streams.mjs": ("!checksum(chunk.data).equals(chunk.checksum)", "false"),
        "training.mjs": ("samples % size > 1 ?", "samples % size > 0 ?"),
    }
    mistaken = changed(client, tmp_path / "mistaken", changes)
    text = (mistaken / "session.mjs").read_text()
    joins = "      case status.UNAUTHENTICATED:\n"
    (mistaken / "session.mjs").write_text(
        text.replace(joins, f"      case status.ABORTED:\n{joins}")
    )
    outcome, log, _ = check(mistaken, "basic")
    assert failed(outcome) == [
        "A single last sample joins the batch before it",
        "A chunk that does not match its checksum is fetched again",
        "A client that another process replaced stops",
    ], log


def test_a_residual_that_changes_with_a_refused_update_fails(client: Path, tmp_path: Path) -> None:
    changes = {"client.mjs": ("feedback.settle(counts)", "feedback.settle(true)")}
    outcome, log, _ = check(changed(client, tmp_path / "mistaken", changes), "compressed")
    assert failed(outcome) == ["After an update that does not count, nothing is lost either"], log
