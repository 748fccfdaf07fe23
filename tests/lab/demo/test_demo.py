"""`fairfleet demo` as a process: a real server, ten real clients, and no process left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from safetensors.numpy import load_file

from fairfleet.lab.digits import CLIENTS
from tests.support.fleet import PROGRAM, until

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start demos in a folder and a process group of the test, as a shell does."""
    started: list[subprocess.Popen[str]] = []

    def start(*words: str) -> subprocess.Popen[str]:
        command = [*PROGRAM, "demo", "--dir", str(tmp_path / "demo"), *words]
        process = subprocess.Popen(
            command,
            cwd=tmp_path,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


def processes_of(folder: Path) -> list[psutil.Process]:
    """Return the processes that mention the test's folder: the demo, its server, its clients."""
    processes = []
    for process in psutil.process_iter(["cmdline", "status"]):
        if any(str(folder) in word for word in process.info["cmdline"] or ()):
            processes.append(process)
    return processes


def client_process(folder: Path, name: str) -> psutil.Process:
    return next(
        process
        for process in processes_of(folder)
        if name in process.cmdline() and "client" in process.cmdline()
    )


def until_training(folder: Path) -> None:
    def committed() -> bool:
        return any((folder / "demo/fedavg/state").glob("models/*1*"))

    until(committed, "the first rounds")


@pytest.mark.slow
def test_the_demo_ends_and_shows_that_a_fair_rule_helps_the_worst_served_clients(
    start: Start, tmp_path: Path
) -> None:
    demo = start("--rounds", "30", "--svg", str(tmp_path / "demo.svg"))
    output, errors = demo.communicate(timeout=120)
    assert (demo.returncode, errors) == (0, "")
    assert output.count("finished after 30 rounds: all rounds are done") == 2
    summary = output[output.rindex("client ") :]
    rows = [
        line.split()
        for line in summary.splitlines()
        if line.count(" %") == 2 and "worst" not in line
    ]
    shares = {
        row[0]: [float(row[index - 1]) for index, word in enumerate(row) if word == "%"]
        for row in rows[:11]
    }
    assert set(shares) == {*CLIENTS, "mean"}
    assert set(list(shares)[:2]) == {"rotated-0", "rotated-1"}
    fedavg, fedlf = ([shares[name][column] for name in CLIENTS] for column in (0, 1))
    assert min(fedlf) > min(fedavg) + 20, "the worst client is far better served by the fair rule"
    assert shares["mean"][1] > shares["mean"][0] - 3
    assert "Served badly: rotated-0 and rotated-1." in summary
    for part in ("30 rounds", "to clients", "(650 parameters)", "With fedlf rotated-0 goes from"):
        assert part in summary
    for rule in ("fedavg", "fedlf"):
        trained = load_file(tmp_path / "demo" / f"{rule}.safetensors")
        assert sum(array.size for array in trained.values()) == 650
        assert all(abs(array).max() > 0.01 for array in trained.values())
    assert "rotated-0" in "".join(ElementTree.parse(tmp_path / "demo.svg").getroot().itertext())
    assert not processes_of(tmp_path)


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ("fedlv", "did you mean 'fedlf'"),
        ("fedfv,alfa=1", "'alpha'"),
        ("fedfv,tau=1,tau=2", "tau more than once"),
    ],
)
def test_an_unusable_rule_is_reported_before_anything_starts(
    start: Start, rule: str, message: str
) -> None:
    demo = start("--rule", rule)
    _, errors = demo.communicate(timeout=30)
    assert demo.returncode == 2
    assert message in errors


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "whole_group", "code"),
    [
        pytest.param(signal.SIGINT, True, 130, id="ctrl-c"),
        pytest.param(signal.SIGTERM, False, 143, id="term"),
    ],
)
def test_a_demo_that_is_stopped_leaves_no_process(
    start: Start, tmp_path: Path, number: signal.Signals, whole_group: bool, code: int
) -> None:
    demo = start("--rounds", "10000")
    until_training(tmp_path)
    (os.killpg if whole_group else os.kill)(demo.pid, number)
    _, errors = demo.communicate(timeout=20)
    assert (demo.returncode, errors) == (code, "")
    assert not processes_of(tmp_path)


@pytest.mark.slow
def test_a_client_that_dies_is_named_and_the_end_of_its_log_is_shown(
    start: Start, tmp_path: Path
) -> None:
    demo = start("--rounds", "10000")
    until_training(tmp_path)
    client_process(tmp_path, "upright-3").kill()
    _, errors = demo.communicate(timeout=20)
    assert demo.returncode == 1
    assert "upright-3 ended unexpectedly (killed by signal 9)" in errors
    assert "joined demo at 127.0.0.1" in errors
    assert not processes_of(tmp_path)
