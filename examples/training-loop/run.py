"""Run the federation on this machine: a server, and a process for each client.

The server reads its settings from federation.yaml. Logs and the trained model are in the folder
fairfleet-run, which each run replaces. `python run.py --help` has the options.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

FAIRFLEET = [sys.executable, "-m", "fairfleet.common.cli"]  # `fairfleet` of this environment
FOLDER = Path("fairfleet-run")
# Small models train faster if the processes do not compete for the cores with many threads.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"} | os.environ

Process = subprocess.Popen[bytes]


def main() -> None:
    """Train with as many clients as the command line says, and show how well each is served."""
    parser = argparse.ArgumentParser(description="Run the federation on this machine.")
    parser.add_argument("--clients", type=int, default=3, help="number of clients")
    parser.add_argument("--rounds", type=int, help="number of rounds (see federation.yaml)")
    parser.add_argument("--data-dir", type=Path, help="folder of the real data (see README.md)")
    arguments = parser.parse_args()

    task = ["--task", "task:task", "-o", f"clients={arguments.clients}"]
    if arguments.data_dir:
        task += ["-o", f"data_dir={arguments.data_dir.resolve()}"]
    server = ["--minimum-clients", str(arguments.clients)]
    if arguments.rounds:
        server += ["--rounds", str(arguments.rounds)]
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir()
    fairfleet("init", *task, "-o", "client=0", "--output", str(FOLDER / "initial.safetensors"))
    processes: dict[str, Process] = {}
    try:
        train(arguments.clients, task, server, processes)
    finally:
        for process in processes.values():
            process.terminate()
        for process in processes.values():
            process.wait()


def train(
    clients: int, task: Sequence[str], server: Sequence[str], processes: dict[str, Process]
) -> None:
    """Run a server and its clients until the training is finished."""
    model, state = str(FOLDER / "initial.safetensors"), str(FOLDER / "state")
    server = ["-c", "federation.yaml", "--model", model, "--state-dir", state, *server]
    processes["server"] = start("server", "server", "--listen", "127.0.0.1:0", *server)
    address = serving_address(processes["server"])
    for client in range(clients):
        name = f"client-{client}"
        words = ["--server", address, "--name", name, "--state-dir", str(FOLDER / "clients")]
        processes[name] = start(name, "client", *task, "-o", f"client={client}", *words)
    print(f"{clients} clients train; watch them with: fairfleet watch --server {address}")
    while running := [name for name, process in processes.items() if process.poll() is None]:
        check(processes)
        if running == ["server"]:  # the clients end by themselves, the server does not
            break
        time.sleep(0.1)
    fairfleet("status", "--server", address)
    fairfleet("export", "--server", address, "--output", str(FOLDER / "trained.safetensors"))


def fairfleet(*words: str) -> None:
    """Show a command, and run it to its end."""
    print("$ fairfleet", *words, flush=True)
    if code := subprocess.run([*FAIRFLEET, *words], check=False, env=ENVIRONMENT).returncode:
        sys.exit(code)


def start(name: str, *words: str) -> Process:
    """Start a command, with a log of its own."""
    print("$ fairfleet", *words, flush=True)
    with (FOLDER / f"{name}.log").open("wb") as log:
        return subprocess.Popen(
            [*FAIRFLEET, *words], stdout=log, stderr=subprocess.STDOUT, env=ENVIRONMENT
        )


def serving_address(server: Process) -> str:
    """Wait until the server is ready, and return its address."""
    while True:
        for line in (FOLDER / "server.log").read_text("utf-8").splitlines(keepends=True):
            if line.startswith("serving on ") and line.endswith("\n"):
                return line.removeprefix("serving on ").strip()
        check({"server": server})
        time.sleep(0.1)


def check(processes: dict[str, Process]) -> None:
    """End the program with the log of a process that has failed."""
    for name, process in processes.items():
        code = process.poll()
        if code or (code is not None and name == "server"):
            log = (FOLDER / f"{name}.log").read_text("utf-8")
            sys.exit(f"{name} ended with code {code}. Its log:\n{log}")


if __name__ == "__main__":
    main()
