"""Measure what a client writes to its disk in each round, by codec and error feedback.

    python benchmarks/client_writes.py [--parameters 1000000] [--rounds 8] [--json]

For each row it runs a server and one real client, whose task moves every parameter at random. It
reads the kernel's count of the bytes that the client writes to files (`wchar` in /proc/PID/io; gRPC
sends over its sockets in another way, which is not in this count). `ratio_to_update` is relative to
the size of the encoded update, `bytes_per_parameter` to the model. Linux only.
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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fairfleet.common.codecs import roundtrip

PROGRAM = [sys.executable, "-m", "fairfleet.common.cli"]
TASK = """
import numpy as np
from fairfleet.client.task import Trained
from fairfleet.common.reports import Evaluation, TrainReport
from fairfleet.common.tensors import Model

class NoiseTask:
    device, train_samples, test_samples = "cpu", 10, 0

    def __init__(self, size):
        self._size = size

    def initial_model(self):
        return Model.of({"weight": np.zeros(self._size, np.float32)})

    def train(self, model, job):
        step = np.random.default_rng(job.plan.seed).standard_normal(self._size, dtype=np.float32)
        report = TrainReport(samples=10, loss_before=1.0, steps=1, learning_rate=0.1)
        return Trained({"weight": model["weight"] - step}, report)

    def evaluate(self, model):
        return Evaluation(samples=1, loss=1.0)

def task(size):
    return NoiseTask(int(size))
"""


class Case(NamedTuple):
    """A codec, and how it is used."""

    codec: str
    error_feedback: str = "auto"
    prediction: bool = True
    flags: tuple[str, ...] = ()


CASES = (
    Case("raw32"),
    Case("int8"),
    Case("int8", error_feedback="true"),
    Case("int8", error_feedback="true", flags=("--no-error-feedback",)),
    Case("int4"),
    Case("int4", error_feedback="true"),
    Case("sign"),
    Case("topk:0.1"),
    Case("topk:0.1", prediction=False),
    Case("topsign:0.1"),
)


def main() -> None:
    """Read the arguments, measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--parameters", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    for case in CASES:
        row = measure(case, given.parameters, given.rounds)
        if given.json:
            print(json.dumps(row), flush=True)
        else:
            print(
                f"{case.codec:12} error feedback {case.error_feedback:5} "
                f"{'prediction' if row['prediction'] else '':11}{' '.join(case.flags):20} "
                f"{row['bytes_per_parameter']:5.2f} bytes per parameter and round, "
                f"{row['ratio_to_update']:5.2f} x the update",
                flush=True,
            )


def measure(case: Case, parameters: int, rounds: int) -> dict[str, Any]:
    """Return what a client writes in each round."""
    with (
        tempfile.TemporaryDirectory() as name,
        federation(Path(name), case, parameters, rounds) as (
            client,
            log,
        ),
    ):
        wait(lambda: "joined" in log.read_text())
        # Since the client joined it has written at most its first update.
        before = written = written_bytes(client.pid)
        while client.poll() is None:
            written = max(written, written_bytes(client.pid))
            time.sleep(0.002)
        if client.returncode:
            raise RuntimeError(log.read_text())
    update_bytes = encoded_bytes(case.codec, parameters)
    per_round = (written - before) / rounds
    return {
        "codec": case.codec,
        "error_feedback": case.error_feedback,
        "prediction": case.prediction and case.codec.startswith("top"),
        "flags": list(case.flags),
        "parameters": parameters,
        "rounds": rounds,
        "bytes_per_round": per_round,
        "bytes_per_parameter": per_round / parameters,
        "ratio_to_update": per_round / update_bytes,
    }


@contextmanager
def federation(
    folder: Path, case: Case, parameters: int, rounds: int
) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """Run a server and one client; the client waits until it is known to have joined."""
    (folder / "noise_task.py").write_text(TASK)
    task = ["--task", "noise_task:task", "-o", f"size={parameters}"]
    run("init", *task, "--output", "model.safetensors", folder=folder)
    address = f"127.0.0.1:{free_port()}"
    settings = {
        "rounds": rounds,
        "round.minimum_clients": 1,
        "round.evaluate_every": 0,
        "http.port": 0,
        "codec": case.codec,
        "compression.error_feedback": case.error_feedback,
        "compression.prediction": str(case.prediction).lower(),
    }
    words = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    server = start("server", "--listen", address, "--state-dir", "state", "--model",
                   "model.safetensors", *words, folder=folder, output=subprocess.PIPE)  # fmt: skip
    try:
        assert server.stdout is not None
        server.stdout.readline()
        client = start("client", "--server", address, "--name", "device", *task, *case.flags,
                       "--state-dir", "client", folder=folder, log="client.log")  # fmt: skip
        try:
            yield client, folder / "client.log"
        finally:
            client.kill()
            client.wait()
    finally:
        server.kill()
        server.wait()


def start(
    *words: str, folder: Path, output: int = subprocess.DEVNULL, log: str = "server.log"
) -> subprocess.Popen[bytes]:
    """Start a command of the program in a folder."""
    with (folder / log).open("w") as file:
        return subprocess.Popen([*PROGRAM, *words], cwd=folder, stdout=output, stderr=file)


def run(*words: str, folder: Path) -> None:
    """Run a command of the program in a folder."""
    subprocess.run([*PROGRAM, *words], cwd=folder, check=True, stdout=subprocess.DEVNULL)


def encoded_bytes(codec: str, parameters: int) -> int:
    """Return the size of an update of this kind."""
    values = np.random.default_rng(0).standard_normal(parameters, dtype=np.float32)
    return roundtrip(codec, values, 0).encoded_bytes


def written_bytes(pid: int) -> int:
    """Return how many bytes a process has written to files; 0 after it has ended."""
    try:
        lines = Path(f"/proc/{pid}/io").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("wchar")), 0)


def wait(condition: Callable[[], bool]) -> None:
    """Wait up to a minute until a condition holds."""
    for _ in range(60_000):
        if condition():
            return
        time.sleep(0.001)
    raise TimeoutError("the client did not start within 60 seconds")


def free_port() -> int:
    """Return a TCP port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    if not os.path.exists("/proc/self/io"):
        sys.exit("this benchmark reads /proc/PID/io, which only Linux has")
    main()
