"""scripts/install-test-packages, with an apt-get that only writes down what it is asked for."""

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
    """Programs that a machine has, and no others but those of /sbin: root is the user, apt-get writes to a file."""
    for name in PROGRAMS:
        program(tmp_path / name, "")
    program(tmp_path / "id", "echo 0")
    program(tmp_path / "apt-get", f'echo "$@" >> {tmp_path}/asked')
    return tmp_path


def program(path: Path, does: str) -> None:
    path.write_text(f"#!/bin/sh\n{does}\n")
    path.chmod(0o755)


def run(machine: Path) -> str:
    bash = shutil.which("bash")
    assert bash is not None
    done = subprocess.run([bash, SCRIPT], env={"PATH": str(machine)}, capture_output=True, text=True, check=True)
    return done.stdout


def test_programs_that_are_there_are_left_alone_whichever_package_they_came_from(machine: Path) -> None:
    assert run(machine) == ""
    assert not (machine / "asked").exists()


def test_a_program_that_is_missing_is_installed_and_nothing_else(machine: Path) -> None:
    (machine / "prometheus").unlink()
    assert run(machine) == "installed: prometheus\n"
    assert (machine / "asked").read_text().splitlines()[-1].endswith("install -y --no-install-recommends prometheus")


def test_who_is_not_root_is_told_what_is_missing_and_nothing_fails(machine: Path) -> None:
    (machine / "prometheus").unlink()
    program(machine / "id", "echo 1000")
    assert "prometheus; the tests that need them are skipped" in run(machine)
    assert not (machine / "asked").exists()
