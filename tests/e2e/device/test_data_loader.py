"""A client that reads its data with a DataLoader's workers stops as cleanly as any other."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.fleet import PROGRAM, Fleet, until

TASK = """
import time

import torch
from torch.utils.data import DataLoader, Dataset

from fairfleet.client.torch import TorchTask


class SlowSamples(Dataset):
    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        time.sleep(0.005)
        open("read", "a").close()
        return torch.full((3,), float(index % 7)), index % 2


def task(samples="4000"):
    loader = DataLoader(SlowSamples(int(samples)), batch_size=4, num_workers=2)
    return TorchTask(lambda: torch.nn.Linear(3, 2), train=loader, loss=torch.nn.CrossEntropyLoss())
"""


Start = Callable[..., subprocess.Popen[bytes]]
ADAFED = "{name: adafed}"  # it needs a pass over all data before the training


@pytest.fixture
def start(tmp_path: Path, fleet: Fleet) -> Iterator[Start]:
    """Provide a function that starts a command in a group of its own, with a log of its name."""
    (tmp_path / "slow_samples.py").write_text(TASK)
    processes = list[subprocess.Popen[bytes]]()

    def start_process(name: str, *words: str) -> subprocess.Popen[bytes]:
        if words[0] == "client":
            words += ("--name", name, "--server", fleet.address, "--state-dir", str(tmp_path / "s"))
        command = [*PROGRAM, *words, "--task", "slow_samples:task"]
        with open(fleet.folder / f"{name}.log", "ab") as log:
            process = subprocess.Popen(
                command, cwd=tmp_path, stderr=log, stdout=log, start_new_session=True
            )
        processes.append(process)
        return process

    model = str(fleet.folder / "model.safetensors")
    assert start_process("init", "init", "--output", model).wait(60) == 0, fleet.log("init.log")
    yield start_process
    for process in processes:
        process.kill()
        process.wait(10)


@pytest.mark.slow
@pytest.mark.torch
def test_a_signal_to_a_client_and_its_workers_stops_it_without_a_failed_training(
    fleet: Fleet, tmp_path: Path, start: Start
) -> None:
    """As Ctrl-C does, or systemd. The workers end first, and the pass over the data with them."""
    fleet.start_server(round__minimum_clients=1, rule=ADAFED)
    client = start("ann", "client")
    until(lambda: (tmp_path / "read").exists(), "the workers to read")
    os.killpg(client.pid, signal.SIGTERM)
    assert client.wait(30) == 0, fleet.log("ann.log")
    assert "stopped" in fleet.log("ann.log")
    assert "failed" not in fleet.log("ann.log")


@pytest.mark.slow
@pytest.mark.torch
def test_a_pass_that_only_measures_ends_when_the_round_goes_on_without_it(
    fleet: Fleet, start: Start
) -> None:
    fleet.start_server(round__minimum_clients=1, round__deadline_seconds=1, rule=ADAFED)
    slow = start("slow", "client")
    until(lambda: fleet.status().asked, "the slow client to be selected")
    start("quick", "client", "-o", "samples=8")
    until(
        lambda: "was abandoned: the round continued" in fleet.log("slow.log"), "the end of a pass"
    )
    assert slow.poll() is None, "it stays for the next round"
    assert "failed" not in fleet.log("slow.log")
