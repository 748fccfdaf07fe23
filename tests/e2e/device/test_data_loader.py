"""A client that reads its data with a DataLoader's workers ends as cleanly as any other."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.support.fleet import PROGRAM, Fleet, until

TASK = """
import time

import torch
from torch.utils.data import DataLoader, Dataset

from fairfleet.client.torch import TorchTask


class SlowSamples(Dataset):
    def __len__(self):
        return 4000

    def __getitem__(self, index):
        time.sleep(0.005)
        open("read", "a").close()
        return torch.full((3,), float(index % 7)), index % 2


def task():
    loader = DataLoader(SlowSamples(), batch_size=4, num_workers=2)
    return TorchTask(lambda: torch.nn.Linear(3, 2), train=loader, loss=torch.nn.CrossEntropyLoss())
"""


@pytest.mark.slow
@pytest.mark.torch
def test_a_signal_to_a_client_and_its_workers_stops_it_without_a_failed_training(
    fleet: Fleet, tmp_path: Path
) -> None:
    """As Ctrl-C does, or systemd. The workers end first, and the pass over the data with them."""
    (tmp_path / "slow_samples.py").write_text(TASK)
    task = ("--task", "slow_samples:task")

    def start(*words: str, log: Path) -> subprocess.Popen[bytes]:
        with open(log, "ab") as file:
            return subprocess.Popen(
                [*PROGRAM, *words], cwd=tmp_path, stderr=file, stdout=file, start_new_session=True
            )

    log = tmp_path / "ann.log"
    model = str(fleet.folder / "model.safetensors")
    assert start("init", *task, "--output", model, log=log).wait(60) == 0, log.read_text()
    fleet.start_server(round__minimum_clients=1, rule="{name: adafed}")  # needs a pass
    where = ("--server", fleet.address, "--state-dir", str(tmp_path / "state"))
    client = start("client", "--name", "ann", *task, *where, log=log)
    try:
        until(lambda: (tmp_path / "read").exists(), "the workers to read")
        os.killpg(client.pid, signal.SIGTERM)
        assert client.wait(30) == 0, log.read_text()
    finally:
        client.kill()
        client.wait(10)
    assert "stopped" in log.read_text()
    assert "failed" not in log.read_text()
