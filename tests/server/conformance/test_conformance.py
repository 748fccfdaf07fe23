"""`fairfleet conformance`: our own client passes every level, and clients with faults do not."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.fleet import PATIENCE_SECONDS, PROGRAM, free_port
from tests.support.paths import ROOT

SAMPLES = ROOT / "tests" / "support" / "samples"
ALL_LEVELS = ("basic", "compressed", "delta", "verify", "private")


class Outcome(dict[str, Any]):
    """What the command printed with --json, and its exit code."""

    exit_code = -1

    def failed(self) -> list[str]:
        return [
            entry["check"]
            for level in self["levels"].values()
            for entry in level["checks"]
            if entry["result"] == "fail"
        ]


Run = Callable[..., Outcome]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    """Yield a function that checks our client, with some flags, in some levels."""
    started: list[subprocess.Popen[str]] = []

    def start(words: list[str], **pipes: Any) -> subprocess.Popen[str]:
        started.append(subprocess.Popen([*PROGRAM, *words], cwd=SAMPLES, text=True, **pipes))
        return started[-1]

    def check(*flags: str, levels: tuple[str, ...] = (), task: str = "constants") -> Outcome:
        address = f"127.0.0.1:{free_port()}"
        words = ["conformance", "--listen", address, "--json", "--seconds", "20"]
        words += [word for level in levels for word in ("--level", level)]
        server = start(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        assert server.stderr is not None
        line = server.stderr.readline()
        assert line == f"listening on {address}; start the client now\n", line
        log = (tmp_path / "client.log").open("w")
        client_words = ["client", "--task", f"conformance_task:{task}", "--name", "device"]
        client_words += ["--server", address, "--state-dir", str(tmp_path / "client"), *flags]
        start(client_words, stdout=log, stderr=log)
        output, errors = server.communicate(timeout=4 * PATIENCE_SECONDS)
        assert output, errors
        outcome = Outcome(json.loads(output))
        outcome.exit_code = server.returncode
        return outcome

    yield check
    for process in started:
        process.kill()
        process.wait()


@pytest.mark.slow
def test_our_client_passes_every_level(run: Run) -> None:
    outcome = run()
    assert not outcome.failed(), outcome
    assert tuple(outcome["levels"]) == ALL_LEVELS
    assert outcome["passed"]
    assert outcome.exit_code == 0


@pytest.mark.slow
def test_a_client_without_error_feedback_fails_compressed(run: Run) -> None:
    outcome = run("--no-error-feedback", levels=("compressed",))
    assert outcome.failed() == [
        "What an update lost is in the next one",
        "After an update that does not count, nothing is lost either",
    ]
    assert outcome.exit_code == 1


@pytest.mark.slow
def test_a_client_that_does_less_than_it_reports_fails_basic(run: Run) -> None:
    outcome = run(levels=("basic",), task="miscounting")
    assert outcome.failed() == [
        "An update with a complete report",
        "A single last sample joins the batch before it",
    ]


@pytest.mark.slow
def test_a_client_that_cannot_verify_fails_verify_only(run: Run) -> None:
    outcome = run(levels=("compressed", "verify"), task="unmeasuring")
    assert outcome.failed() == ["Join offers to verify steps"]
    assert outcome["levels"]["compressed"]["passed"]


@pytest.mark.slow
def test_a_client_that_measures_the_loss_of_another_model_fails_verify(run: Run) -> None:
    outcome = run(levels=("verify",), task="mismeasuring")
    assert outcome.failed() == ["The loss on the model of `initial_model` is reported"]


def test_an_unknown_level_is_refused_before_anything_listens() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "fairfleet.common.cli", "conformance", "--level", "bsic"],
        text=True,
        capture_output=True,
        check=False,
    )
    assert done.returncode == 2
    assert "there is no level 'bsic'; expected one of basic, compressed, delta" in done.stderr
