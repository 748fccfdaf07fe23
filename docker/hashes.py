"""Write docker/requirements-*.txt: what each layer of the images installs, with hashes of wheels.

    python docker/hashes.py

The versions are those of constraints.txt; which packages belong to a layer is read from the
packages that are installed with this Python. pip reports, without downloading, which wheels it
would take on each platform below, and for their hashes. `make pins` runs this at its end.

PyTorch's own wheel is not among them: docs/how-to/supply-chain.md says why, and how it is checked.
Its version for each machine is copied into docker/torch.txt, so that no other pin changes that file
and with it a very large layer.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from collections import defaultdict
from collections.abc import Iterable
from importlib.metadata import requires
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from requirements import requirements

ROOT = Path(__file__).resolve().parents[1]
PYTHONS = ("3.11", "3.12", "3.13")
MACHINES = ("x86_64", "aarch64")
MANYLINUX = ("1", "2010", "2014", "_2_17", "_2_24", "_2_26", "_2_27", "_2_28", "_2_34")
TORCH_NEEDS = [
    "filelock",
    "fsspec",
    "jinja2",
    "networkx",
    "setuptools",
    "sympy",
    "typing-extensions",
]
HEADER = (
    "# Made by docker/hashes.py for Linux on x86-64 and arm64, Python 3.11 to 3.13. Do not edit.\n"
)
TORCH_HEADER = "# Made by docker/hashes.py from constraints.txt. Do not edit.\n"


def layers() -> dict[str, list[str]]:
    """Return what each layer of docker/Dockerfile installs, by the name in its file's name."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    project = settings["project"]
    return {
        "core": requirements(project, []),
        "server": requirements(project, ["server", "privacy"]),
        "lab": requirements(project, ["lab"]),
        "torch": TORCH_NEEDS,
        "build": settings["build-system"]["requires"],
        "image": ["dumb-init"],
    }


def constraints() -> list[Requirement]:
    """Return the pins of constraints.txt."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return [Requirement(pin) for line in lines if (pin := line.partition("#")[0])]


def pins() -> dict[str, str]:
    """Return the version of each package that is the same on all machines."""
    return {
        canonicalize_name(pin.name): str(pin.specifier).removeprefix("==")
        for pin in constraints()
        if pin.marker is None
    }


def torch_pins() -> str:
    """Return the text of docker/torch.txt."""
    return TORCH_HEADER + "".join(f"{pin}\n" for pin in constraints() if pin.name == "torch")


def closure(roots: Iterable[str]) -> set[str]:
    """Return these packages and all that they need, by what is installed here."""
    visited: set[tuple[str, str]] = set()
    pending = [Requirement(text) for text in roots]
    while pending:
        requirement = pending.pop()
        for extra in ("", *requirement.extras):
            package = canonicalize_name(requirement.name), extra
            if package not in visited:
                visited.add(package)
                pending += _needs(requirement.name, extra)
    return {name for name, _ in visited}


def _needs(package: str, extra: str) -> list[Requirement]:
    """Return what an installed package needs on this machine with one extra, or with none ("")."""
    needs = [Requirement(text) for text in requires(package) or []]
    return [need for need in needs if not need.marker or need.marker.evaluate({"extra": extra})]


def wheel_hashes(names: Iterable[str], versions: dict[str, str]) -> dict[str, set[str]]:
    """Return by package the SHA-256 of every wheel that one of the platforms installs."""
    digests: defaultdict[str, set[str]] = defaultdict(set)
    requested = [f"{name}=={versions[name]}" for name in sorted(names)]
    for python in PYTHONS:
        for machine in MACHINES:
            for name, digest in _wheels(requested, python, machine):
                digests[name].add(digest)
    return digests


def _wheels(requested: list[str], python: str, machine: str) -> list[tuple[str, str]]:
    """Return the name and the SHA-256 of each wheel that pip would install on one platform."""
    platforms = [word for tag in MANYLINUX for word in ("--platform", f"manylinux{tag}_{machine}")]
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        subprocess.run(
            [
                sys.executable, "-m", "pip", "install", "--quiet", "--dry-run",
                "--ignore-installed", "--no-deps", "--only-binary=:all:",
                "--python-version", python, *platforms, "--target", folder,
                "--report", str(report), *requested,
            ],
            check=True,
            env=_environment(),
        )  # fmt: skip
        wheels = json.loads(report.read_text(encoding="utf-8"))["install"]
    for wheel in wheels:
        if not wheel["download_info"]["url"].startswith("http"):
            raise SystemExit(f"{wheel['metadata']['name']} is not on the index, only on this disk")
    return [
        (
            canonicalize_name(wheel["metadata"]["name"]),
            wheel["download_info"]["archive_info"]["hashes"]["sha256"],
        )
        for wheel in wheels
    ]


def _environment() -> dict[str, str]:
    """Return an environment in which pip asks its index alone, with its own certificates.

    A wheel that lies on this machine may differ from the one that others install.
    """
    configuration = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True
    )
    settings = re.findall(r"^\S+\.(index-url|cert)='(.*)'$", configuration.stdout, re.MULTILINE)
    variables = {key: value for key, value in os.environ.items() if not key.startswith("PIP_")}
    variables |= {f"PIP_{key.upper().replace('-', '_')}": value for key, value in settings}
    return variables | {"PIP_CONFIG_FILE": os.devnull, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}


def file_text(
    packages: Iterable[str], versions: dict[str, str], digests: dict[str, set[str]]
) -> str:
    """Return the text of one requirements file: a pin and its hashes for every package."""

    def pin(name: str) -> str:
        hashes = [f"--hash=sha256:{digest}" for digest in sorted(digests[name])]
        return " \\\n    ".join([f"{name}=={versions[name]}", *hashes])

    return HEADER + "".join(f"{pin(name)}\n" for name in sorted(packages))


def main() -> None:
    """Write all files and report how many packages and hashes each has."""
    versions = pins()
    packages = {layer: closure(roots) for layer, roots in layers().items()}
    digests = wheel_hashes(set().union(*packages.values()), versions)
    for layer, names in packages.items():
        file = ROOT / "docker" / f"requirements-{layer}.txt"
        file.write_text(file_text(names, versions, digests), encoding="utf-8")
        count = sum(len(digests[name]) for name in names)
        print(f"{file.name}: {len(names)} packages, {count} hashes")
    (ROOT / "docker" / "torch.txt").write_text(torch_pins(), encoding="utf-8")


if __name__ == "__main__":
    main()
