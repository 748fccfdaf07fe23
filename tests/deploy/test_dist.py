"""`make dist` builds a wheel and an sdist that can be installed without the repository."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import venv
from pathlib import Path
from zipfile import ZipFile

import pytest

from tests.deploy.settings import ROOT

VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]


def build(source: Path, output: Path, *words: str) -> Path:
    """Build like `make dist`; return the wheel."""
    command = [sys.executable, "-m", "hatchling", "build", "--directory", str(output), *words]
    subprocess.run(command, cwd=source, check=True, capture_output=True, timeout=120)
    (wheel,) = output.glob("*.whl")
    return wheel


def content(wheel: Path) -> dict[str, bytes]:
    with ZipFile(wheel) as opened:
        return {name: opened.read(name) for name in opened.namelist()}


def test_the_changelog_has_the_version() -> None:
    assert re.search(
        rf"^## {re.escape(VERSION)} - ", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE
    )


def test_the_newest_version_of_the_changelog_has_upgrade_notes() -> None:
    sections = (ROOT / "CHANGELOG.md").read_text().split("\n## ")[1:]
    assert sections[0].startswith(f"{VERSION} - "), "the topmost version is the one being made"
    assert all("### Upgrade notes\n" in section for section in sections)


def test_pages_name_wheels_and_images_of_this_version() -> None:
    named = [
        (page.name, name)
        for page in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md"))
        for name in re.findall(r"\bfairfleet[a-z-]*[-:]\d+\.\d+\.\d+", page.read_text())
    ]
    assert len(named) > 3
    assert [(page, name) for page, name in named if not name.endswith(VERSION)] == []


def test_make_dist_builds_wheel_and_sdist() -> None:
    output = subprocess.run(
        ["make", "-n", "dist"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    assert "hatchling build --directory dist" in output


@pytest.mark.slow
def test_the_sdist_builds_the_same_wheel(tmp_path: Path) -> None:
    wheel = build(ROOT, tmp_path / "dist")
    (sdist,) = (tmp_path / "dist").glob("*.tar.gz")
    with tarfile.open(sdist) as opened:
        opened.extractall(tmp_path, filter="data")
    unpacked = tmp_path / f"fairfleet-{VERSION}"
    again = build(unpacked, tmp_path / "again", "--target", "wheel")
    assert wheel.name == again.name == f"fairfleet-{VERSION}-py3-none-any.whl"
    assert content(wheel) == content(again)
    assert {"LICENSE", "CHANGELOG.md", "Makefile", "constraints.txt", "tests"} <= {
        p.name for p in unpacked.iterdir()
    }


def test_the_wheel_has_every_file_of_the_packages(tmp_path: Path) -> None:
    """This includes pages, stubs and sweeps. The wheel has nothing else."""
    packed = {
        name
        for name in content(build(ROOT, tmp_path, "--target", "wheel"))
        if ".dist-info/" not in name
    }
    roots = ("proto", "common", "server", "client", "lab")
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", *roots],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    ours = {
        name.partition("/")[2]
        for name in listed.stdout.splitlines()
        if f"{name.split('/')[0]}/fairfleet/" in name
    }
    assert packed == ours


class Environment:
    """An empty virtual environment, and an empty working directory."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "elsewhere"
        self.folder.mkdir()
        self._programs = folder / "environment" / "bin"
        venv.create(folder / "environment", with_pip=True)

    def install(self, wheel: str) -> None:
        words = (
            "install",
            "--quiet",
            "--disable-pip-version-check",
            "-c",
            str(ROOT / "constraints.txt"),
            wheel,
        )
        done = self.run("pip", *words)
        assert done.returncode == 0, done.stderr

    def run(self, name: str, *words: str) -> subprocess.CompletedProcess[str]:
        environment = {
            key: value
            for key, value in os.environ.items()
            if key not in ("PYTHONPATH", "VIRTUAL_ENV")
        }
        command = [self._programs / name, *words]
        return subprocess.run(
            command,
            cwd=self.folder,
            env=environment,
            text=True,
            capture_output=True,
            timeout=300,
            check=False,
        )


@pytest.mark.slow
def test_the_wheel_runs_in_an_empty_environment(tmp_path: Path) -> None:
    wheel, empty = build(ROOT, tmp_path / "dist", "--target", "wheel"), Environment(tmp_path)
    empty.install(str(wheel))  # what a device needs
    assert empty.run("fairfleet", "--version").stdout == f"fairfleet {VERSION}\n"
    assert empty.run("fairfleet", "pki", "init", "fleet.example").returncode == 0
    assert "--credentials" in empty.run("fairfleet", "client", "--help").stdout
    missing = empty.run("fairfleet", "server")
    assert (missing.returncode, "pip install 'fairfleet[server]'" in missing.stderr) == (2, True), (
        missing.stderr
    )

    empty.install(f"{wheel}[lab]")
    done = empty.run("fairfleet", "demo", "--rounds", "3", "--rule", "fedlf", "--json")
    assert done.returncode == 0, done.stderr
    assert "fedlf" in json.dumps(json.loads(done.stdout))
    where = empty.run("python", "-c", "import fairfleet.server as s; print(s.__file__)").stdout
    assert str(tmp_path) in where, "what ran is what was installed"
