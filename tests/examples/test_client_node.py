"""The client in Node.js decodes the test vectors and passes the levels that it claims."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

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


def test_it_passes_the_levels_basic_and_compressed(client: Path) -> None:
    address = f"127.0.0.1:{free_port()}"
    words = ["conformance", "--listen", address, "--json", "--seconds", "20"]
    words += [word for level in LEVELS for word in ("--level", level)]
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
            log, _ = process.communicate(timeout=PATIENCE_SECONDS)
        finally:
            server.kill()
            process.kill()
    assert output, errors
    outcome = json.loads(output)
    assert outcome["passed"], (outcome, log)
    assert tuple(outcome["levels"]) == LEVELS
    assert process.returncode == 1, "it stops by itself, with an error"
    assert "another process joined as node-1" in log
