"""Renew every file of pinned versions from the package index: `make pins`.

    python scripts/renew_pins.py [FILE ...]        by default, all of them

pip resolves the requirements of each environment without installing anything. A comment after a
pin stays. A pin with a marker (`; platform_machine …`) is a decision, not a result: it stays as
it is, and the others are chosen to fit it. Libraries of CUDA builds are left out: the pinned
PyTorch is a CPU build. `make pins` then installs the new versions and renews the hashes.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "docker"))

from requirements import requirements  # noqa: E402

# The compiler of the stubs stays at the release for protobuf 6, which pyproject.toml allows.
STUB_COMPILER = ["grpcio-tools==1.76.0", "mypy-protobuf==3.7.0"]
CUDA_LIBRARIES = ("nvidia-", "nvidia_", "cuda-", "cuda_", "triton")


def pin_files() -> dict[str, list[str]]:
    """Return the requirements that each file of pins is resolved from."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return {
        "constraints.txt": requirements(project, ["dev"]),
        "k8s/checkov.txt": ["checkov"],
        "proto/generate-requirements.txt": STUB_COMPILER,
    }


def resolve(roots: list[str], decided: Iterable[str]) -> dict[str, str]:
    """Return the version of every package that pip would install for these requirements.

    `decided` are pins that pip must respect. Raises CalledProcessError where they contradict.
    """
    with tempfile.TemporaryDirectory() as folder:
        report, constraints = Path(folder, "report.json"), Path(folder, "constraints.txt")
        constraints.write_text("".join(f"{pin}\n" for pin in decided), encoding="utf-8")
        subprocess.run(
            [
                sys.executable, "-m", "pip", "install", "--quiet", "--dry-run",
                "--ignore-installed", "--disable-pip-version-check",
                "--constraint", str(constraints), "--report", str(report), *roots,
            ],
            check=True,
        )  # fmt: skip
        packages = json.loads(report.read_text(encoding="utf-8"))["install"]
    versions = {
        package["metadata"]["name"]: package["metadata"]["version"].partition("+")[0]
        for package in packages
    }
    return {
        name: version
        for name, version in versions.items()
        if not name.lower().startswith(CUDA_LIBRARIES)
    }


def split_file(text: str) -> tuple[list[str], list[str], dict[str, str]]:
    """Return a file's comment lines at the top, its decided pins, and its comments by package."""
    header, decided, comments = [], [], {}
    for line in text.splitlines():
        pin, hash_sign, comment = line.partition("#")
        if not pin.strip():
            header.append(line)
        elif ";" in pin:
            decided.append(line)
        elif hash_sign:
            comments[pin.partition("==")[0]] = comment
    return header, decided, comments


def renewed_text(text: str, versions: dict[str, str]) -> str:
    """Return a file of pins with these versions, its comments and its decided pins."""
    header, decided, comments = split_file(text)
    decided_names = {line.partition("==")[0] for line in decided}
    pins = [
        f"{name}=={version}" + (f"  #{comments[name]}" if name in comments else "")
        for name, version in versions.items()
        if name not in decided_names
    ]
    return "\n".join([*header, *sorted([*pins, *decided], key=str.lower)]) + "\n"


def main() -> None:
    """Renew the files that the command line names, or all."""
    environments = pin_files()
    for name in sys.argv[1:] or environments:
        file = ROOT / name
        text = file.read_text(encoding="utf-8")
        _, decided, _ = split_file(text)
        versions = resolve(environments[name], [line.partition("#")[0] for line in decided])
        file.write_text(renewed_text(text, versions), encoding="utf-8")
        print(f"{name}: {len(versions)} packages")


if __name__ == "__main__":
    main()
