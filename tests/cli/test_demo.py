"""`fairfleet demo` as people run it: a real server, ten real clients, and nothing of them left behind."""

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
from tests.e2e.fleet import PROGRAM, until

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a demo in a folder and a process group of the test's own, as a shell does."""
    started: list[subprocess.Popen[str]] = []

    def start(*words: str) -> subprocess.Popen[str]:
        command = [*PROGRAM, "demo", "--dir", str(tmp_path / "demo"), *words]
        process = subprocess.Popen(
            command, cwd=tmp_path, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
        )
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


def ours(folder: Path) -> list[psutil.Process]:
    """The processes that mention the test's folder: the demo, its server, its clients."""
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        if any(str(folder) in word for word in process.info["cmdline"] or ()):
            found.append(process)
    return found


def client_process(folder: Path, name: str) -> psutil.Process:
    return next(process for process in ours(folder) if name in process.cmdline() and "client" in process.cmdline())


def until_training(folder: Path) -> None:
    def committed() -> bool:
        return any((folder / "demo/fedavg/state").glob("models/*1*"))

    until(committed, "the first rounds")


def test_the_demo_ends_by_itself_and_shows_who_is_served_badly(start: Start, tmp_path: Path) -> None:
    demo = start("--rounds", "20", "--svg", str(tmp_path / "demo.svg"))
    said, errors = demo.communicate(timeout=60)
    assert (demo.returncode, errors) == (0, "")
    assert "finished after 20 rounds: all rounds are done" in said
    summary = said[said.index("accuracy on its own test images") :]
    shares = {line.split()[0]: line.split()[-2] for line in summary.splitlines() if line.rstrip().endswith("%")}
    assert set(shares) == {*CLIENTS, "mean"}
    assert list(shares)[:2] == ["rotated-0", "rotated-1"]
    accuracies = [float(share) for name, share in shares.items() if name != "mean"]
    assert accuracies == sorted(accuracies)
    assert accuracies[1] < 50 < accuracies[2]
    assert "Served badly: rotated-0 and rotated-1." in summary
    for part in ("20 rounds", "to clients", "(650 parameters)"):
        assert part in summary
    trained = load_file(tmp_path / "demo" / "model.safetensors")
    assert sum(array.size for array in trained.values()) == 650
    assert all(abs(array).max() > 0.01 for array in trained.values())
    assert "rotated-0" in "".join(ElementTree.parse(tmp_path / "demo.svg").getroot().itertext())
    assert not ours(tmp_path)


@pytest.mark.parametrize(
    ("number", "whole_group", "code"),
    [(signal.SIGINT, True, 130), (signal.SIGTERM, False, 143)],
    ids=["ctrl-c", "term"],
)
def test_a_demo_that_is_stopped_leaves_no_process(
    start: Start, tmp_path: Path, number: signal.Signals, whole_group: bool, code: int
) -> None:
    demo = start("--rounds", "10000")
    until_training(tmp_path)
    (os.killpg if whole_group else os.kill)(demo.pid, number)
    _, errors = demo.communicate(timeout=20)
    assert (demo.returncode, errors) == (code, "")
    assert not ours(tmp_path)


def test_a_client_that_dies_is_named_and_the_end_of_its_log_is_shown(start: Start, tmp_path: Path) -> None:
    demo = start("--rounds", "10000")
    until_training(tmp_path)
    client_process(tmp_path, "upright-3").kill()
    _, errors = demo.communicate(timeout=20)
    assert demo.returncode == 1
    assert "upright-3 ended unexpectedly (killed by signal 9)" in errors
    assert "joined demo at 127.0.0.1" in errors
    assert not ours(tmp_path)
