"""Writes docker/requirements-*.txt: what each layer of the images installs, pinned with the hashes of its wheels.

    python docker/hashes.py

The versions are those of constraints.txt; which packages belong to a layer is read from the packages that are
installed here. pip is asked, without downloading, which wheels it would take on each platform below, and for their
hashes. PyTorch's own wheel is not among them: docs/supply-chain.md says why, and how it is checked. Which version each
machine gets is copied into docker/torch.txt: a layer so large should not be built again for every other pin.
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
TORCH_NEEDS = ["filelock", "fsspec", "jinja2", "networkx", "setuptools", "sympy", "typing-extensions"]
HEAD = "# Made by docker/hashes.py for Linux on x86-64 and arm64, Python 3.11 to 3.13. Do not edit.\n"
HEAD_TORCH = "# Made by docker/hashes.py from constraints.txt. Do not edit.\n"


def layers() -> dict[str, list[str]]:
    """What the layers of docker/Dockerfile are asked to install, by the file that says so."""
    told = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    project = told["project"]
    return {
        "core": requirements(project, []),
        "server": requirements(project, ["server"]),
        "lab": requirements(project, ["lab"]),
        "torch": TORCH_NEEDS,
        "build": told["build-system"]["requires"],
        "image": ["dumb-init"],
    }


def constraints() -> list[Requirement]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return [Requirement(words) for line in lines if (words := line.partition("#")[0])]


def pins() -> dict[str, str]:
    """The version of each package that is the same on all machines."""
    return {
        canonicalize_name(pin.name): str(pin.specifier).removeprefix("==")
        for pin in constraints()
        if pin.marker is None
    }


def torch_pins() -> str:
    return HEAD_TORCH + "".join(f"{pin}\n" for pin in constraints() if pin.name == "torch")


def closure(wanted: Iterable[str]) -> set[str]:
    """These packages and all that they need, by what is installed here."""
    found: set[tuple[str, str]] = set()
    left = [Requirement(text) for text in wanted]
    while left:
        requirement = left.pop()
        for extra in ("", *requirement.extras):
            key = canonicalize_name(requirement.name), extra
            if key in found:
                continue
            found.add(key)
            needs = [Requirement(text) for text in requires(requirement.name) or []]
            left += [need for need in needs if need.marker is None or need.marker.evaluate({"extra": extra})]
    return {name for name, _ in found}


def hashes(names: Iterable[str], versions: dict[str, str]) -> dict[str, set[str]]:
    """By package: the SHA-256 of every wheel that one of the platforms would be given."""
    found: defaultdict[str, set[str]] = defaultdict(set)
    for python in PYTHONS:
        for machine in MACHINES:
            for name, digest in _asked([f"{name}=={versions[name]}" for name in sorted(names)], python, machine):
                found[name].add(digest)
    return found


def _asked(wanted: list[str], python: str, machine: str) -> list[tuple[str, str]]:
    platforms = [word for tag in MANYLINUX for word in ("--platform", f"manylinux{tag}_{machine}")]
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        subprocess.run(
            [
                sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed", "--no-deps",
                "--only-binary=:all:", "--python-version", python, *platforms, "--target", folder,
                "--report", str(report), *wanted,
            ],
            check=True,
            env=_environment(),
        )  # fmt: skip
        told = json.loads(report.read_text(encoding="utf-8"))["install"]
    for each in told:
        if not each["download_info"]["url"].startswith("http"):
            raise SystemExit(f"{each['metadata']['name']} came from this machine, not from the index")
    return [
        (canonicalize_name(each["metadata"]["name"]), each["download_info"]["archive_info"]["hashes"]["sha256"])
        for each in told
    ]


def _environment() -> dict[str, str]:
    """For a pip that asks its index alone: a wheel that lies on this machine may be another than all others get."""
    told = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True)
    settings = dict(re.findall(r"^\S+\.(index-url|cert)='(.*)'$", told.stdout, re.MULTILINE))
    kept = {key: value for key, value in os.environ.items() if not key.startswith("PIP_")}
    named = {f"PIP_{key.upper().replace('-', '_')}": value for key, value in settings.items()}
    return kept | named | {"PIP_CONFIG_FILE": os.devnull, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}


def lines(names: Iterable[str], versions: dict[str, str], known: dict[str, set[str]]) -> str:
    def line(name: str) -> str:
        return " \\\n    ".join([f"{name}=={versions[name]}", *(f"--hash=sha256:{d}" for d in sorted(known[name]))])

    return HEAD + "".join(f"{line(name)}\n" for name in sorted(names))


def main() -> None:
    versions, wanted = pins(), {name: closure(needs) for name, needs in layers().items()}
    known = hashes(set().union(*wanted.values()), versions)
    for name, packages in wanted.items():
        file = ROOT / "docker" / f"requirements-{name}.txt"
        file.write_text(lines(packages, versions, known), encoding="utf-8")
        print(f"{file.name}: {len(packages)} packages, {sum(len(known[p]) for p in packages)} hashes")
    (ROOT / "docker" / "torch.txt").write_text(torch_pins(), encoding="utf-8")


if __name__ == "__main__":
    main()
