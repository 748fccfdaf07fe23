"""Measure the memory of one real client process, with numpy alone and with PyTorch.

    python benchmarks/client_memory.py [--rounds 20] [--json]

For each, it runs a server and one client with the demo's digits. It reads the client's peak
resident memory (VmHWM) until the client exits. Machine code that several clients on one machine
share is counted for each of them.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from fairfleet.lab.digits import write_shards

PROGRAM = [sys.executable, "-m", "fairfleet.common.cli"]
TASKS = {"numpy": "fairfleet.lab.digits:softmax", "torch": "fairfleet.lab.digits:torch_mlp"}


def main() -> None:
    """Read the arguments, measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    measured = {name: measure(task, given.rounds) for name, task in TASKS.items()}
    if given.json:
        print(json.dumps(measured))
        return
    for name, memory in measured.items():
        joined, peak = memory["joined_mb"], memory["peak_mb"]
        print(f"{name:6} {joined:6.1f} MB when it has joined, {peak:6.1f} MB at most")


def measure(task: str, rounds: int) -> dict[str, float]:
    """Return the client's memory in MB, after it joined and at its peak."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_shards(folder / "digits")
        options = ["-o", "shard=0", "-o", f"data={folder / 'digits'}"]
        model = folder / "model.safetensors"
        subprocess.run(
            [*PROGRAM, "init", "--task", task, *options, "--output", str(model)],
            check=True,
            stdout=-3,
        )
        address = f"127.0.0.1:{free_port()}"
        settings = {"rounds": rounds, "round.minimum_clients": 1, "http.port": 0}
        settings |= {"plan.steps": 10, "plan.batch_size": 32}
        arguments = [
            word for key, value in settings.items() for word in ("--set", f"{key}={value}")
        ]
        words = [
            "server",
            "--listen",
            address,
            "--state-dir",
            str(folder / "state"),
            "--model",
            str(model),
            *arguments,
        ]
        server = subprocess.Popen(
            [*PROGRAM, *words], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        try:
            assert server.stdout is not None
            server.stdout.readline()
            subprocess.run(
                [*PROGRAM, "pause", "--server", address], check=True, stdout=-3, stderr=-3
            )
            words = ["client", "--server", address, "--name", "device", "--task", task, *options]
            words += ["--state-dir", str(folder / "client")]
            single = os.environ | {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
            log = folder / "log"
            with log.open("w") as file:
                client = subprocess.Popen(
                    [*PROGRAM, *words], env=single, stdout=subprocess.DEVNULL, stderr=file
                )
            try:
                wait(lambda: "joined" in log.read_text())
                joined = resident(client.pid, "VmRSS")
                subprocess.run(
                    [*PROGRAM, "resume", "--server", address], check=True, stdout=-3, stderr=-3
                )
                peak = joined
                while client.poll() is None:
                    peak = max(peak, resident(client.pid, "VmHWM"))
                    time.sleep(0.005)
                assert client.returncode == 0, log.read_text()
            finally:
                client.kill()
        finally:
            server.kill()
    return {"joined_mb": joined, "peak_mb": peak}


def resident(pid: int, field: str) -> float:
    """Return a memory field (VmRSS, VmHWM) of a process in MB; 0 after the process has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0.0
    return next(
        (int(line.split()[1]) / 1000 * 1.024 for line in lines if line.startswith(field)), 0.0
    )


def wait(condition: Callable[[], bool]) -> None:
    """Wait up to a minute until a condition holds."""
    for _ in range(6000):
        if condition():
            return
        time.sleep(0.01)
    raise TimeoutError("a process did not start within 60 seconds")


def free_port() -> int:
    """Return a TCP port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    main()
