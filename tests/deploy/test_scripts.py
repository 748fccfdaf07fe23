"""scripts/install-test-packages, with an apt-get that only records its arguments."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.deploy.settings import ROOT

SCRIPT = ROOT / "scripts" / "install-test-packages"
PROGRAMS = (
    "initdb",
    "prometheus",
    "chromium",
    "dockerd",
    "iptables",
    "mmdebstrap",
    "kubectl",
    "strace",
    "qemu-aarch64-static",
)


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """Return a folder with all programs, for use as PATH.

    The user is root, and apt-get writes its arguments to a file.
    """
    for name in PROGRAMS:
        program(tmp_path / name, "")
    program(tmp_path / "id", "echo 0")
    program(tmp_path / "apt-get", f'echo "$@" >> {tmp_path}/asked')
    return tmp_path


def program(path: Path, script: str) -> None:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def run(machine: Path) -> str:
    bash = shutil.which("bash")
    assert bash is not None
    done = subprocess.run(
        [bash, SCRIPT], env={"PATH": str(machine)}, capture_output=True, text=True, check=True
    )
    return done.stdout


def test_present_programs_are_not_installed_again(
    machine: Path,
) -> None:
    assert run(machine) == ""
    assert not (machine / "asked").exists()


def test_only_missing_programs_are_installed(machine: Path) -> None:
    (machine / "prometheus").unlink()
    assert run(machine) == "installed: prometheus\n"
    assert (
        (machine / "asked")
        .read_text()
        .splitlines()[-1]
        .endswith("install -y --no-install-recommends prometheus")
    )


def test_without_root_the_missing_programs_are_listed(machine: Path) -> None:
    (machine / "prometheus").unlink()
    program(machine / "id", "echo 1000")
    assert "prometheus; the tests that need them are skipped" in run(machine)
    assert not (machine / "asked").exists()
