"""Write the files of the server and of the five machines into the folder `machines`.

That is the data of each machine, a certificate authority with credentials for each, and the
untrained model. Run it once. In a real federation, the data are on the machines already.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

import numpy as np

from fairfleet.lab.datasets import load
from fairfleet.lab.partitioning import partition

MACHINES = 5
FOLDER = Path("machines")


def main() -> None:
    """Read the command line and write the files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-dir", type=Path, help="folder with Fashion-MNIST (see README.md)")
    arguments = parser.parse_args()
    if FOLDER.exists():
        sys.exit(f"{FOLDER} exists already; remove it to begin anew")
    for name in ("data", "server", *(f"machine-{number}" for number in range(MACHINES))):
        (FOLDER / name).mkdir(parents=True)
    write_data(arguments.data_dir)
    # Clients know the server as `server`; an operator on this host uses the published port.
    pki = str(FOLDER / "pki")
    names = ("server", "localhost", "127.0.0.1")
    operator = ("--operator-address", "127.0.0.1:8440")
    fairfleet(
        *("pki", "provision", pki, *names, "--address", "server:8440", *operator),
        *("--clients", str(MACHINES)),
    )
    model, data = FOLDER / "model.safetensors", FOLDER / "data" / "client-0.npz"
    fairfleet("init", "--task", "task:task", "-o", f"data={data}", "--output", str(model))
    # The containers run as the owner of these files.
    Path(".env").write_text(f"FAIRFLEET_USER={os.getuid()}:{os.getgid()}\n", encoding="utf-8")


def write_data(data_dir: Path | None) -> None:
    """Write a file for each machine, with different shares of the classes."""
    dataset = load("fashion-mnist", data_dir) if data_dir else load("digits")
    for machine, indices in enumerate(partition("dirichlet:1", dataset.y, clients=MACHINES)):
        shuffled = np.random.default_rng(machine).permutation(indices)
        file = FOLDER / "data" / f"client-{machine}.npz"
        np.savez_compressed(file, x=dataset.x[shuffled], y=dataset.y[shuffled])
        print(f"{file}: {len(indices)} samples")


def fairfleet(*words: str) -> None:
    """Show a command, and run it to its end."""
    print("$ fairfleet", *words, flush=True)
    if code := subprocess.run([sys.executable, "-m", "fairfleet.common.cli", *words]).returncode:
        sys.exit(code)


if __name__ == "__main__":
    main()
