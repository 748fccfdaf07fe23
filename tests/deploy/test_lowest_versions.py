"""Client and server work with the lowest versions that pyproject.toml declares."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from tests.support.fleet import Fleet, Installation
from tests.support.paths import ROOT

pytestmark = pytest.mark.slow

INSTALL_SECONDS = 600
IMPORT_EVERYTHING = """
import importlib, pkgutil, sys
for part in ("common", "server", "client"):
    package = importlib.import_module(f"fairfleet.{part}")
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        if module.name.endswith("__main__"):
            continue
        try:
            importlib.import_module(module.name)
        except ModuleNotFoundError as error:
            if error.name not in sys.argv[1:]:
                raise
"""
# Modules of extras that are not installed here.
OTHER_EXTRAS = ("torch", "dp_accounting", "psycopg", "tensorboardX")


def lowest_versions() -> dict[str, str]:
    """Return the floor of every direct requirement of the core and the server, by package."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    project = tomllib.loads(text)["project"]
    requirements = [
        Requirement(line)
        for line in (*project["dependencies"], *project["optional-dependencies"]["server"])
    ]
    return {
        canonicalize_name(requirement.name): bound.version
        for requirement in requirements
        for bound in requirement.specifier
        if bound.operator == ">="
    }


@pytest.fixture(scope="module")
def lowest(tmp_path_factory: pytest.TempPathFactory) -> Installation:
    """An environment with this version of FairFleet and the lowest versions of what it needs."""
    folder = tmp_path_factory.mktemp("lowest")
    constraints = folder / "constraints.txt"
    pins = [f"{name}=={version}\n" for name, version in lowest_versions().items()]
    constraints.write_text("".join(pins), encoding="utf-8")
    tasks = ROOT / "tests" / "support"
    installation = Installation(folder / "environment" / "bin" / "python", tasks)
    subprocess.run([sys.executable, "-m", "venv", folder / "environment"], check=True)
    done = run(
        installation,
        *("-m", "pip", "install", "--quiet", "--disable-pip-version-check"),
        *("-c", str(constraints), f"{ROOT}[server]"),
    )
    if done.returncode:
        assert "ResolutionImpossible" not in done.stderr, done.stderr
        pytest.skip(f"pip cannot install the lowest versions here: {done.stderr.strip()[-500:]}")
    return installation


def run(installation: Installation, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [installation.python, *words],
        cwd=installation.folder,
        env=os.environ | installation.environment,
        capture_output=True,
        text=True,
        timeout=INSTALL_SECONDS,
        check=False,
    )


@pytest.fixture
def fleet(tmp_path: Path, lowest: Installation) -> Iterator[Fleet]:
    """A federation whose server and clients all have the lowest versions."""
    fleet = Fleet(tmp_path)
    fleet.installations = dict.fromkeys(("server", "first", "second"), lowest)
    yield fleet
    fleet.end()


def test_the_environment_has_the_lowest_declared_versions(lowest: Installation) -> None:
    done = run(lowest, "-m", "pip", "list", "--format", "freeze", "--disable-pip-version-check")
    lines = [line.split("==") for line in done.stdout.splitlines()]
    installed = {canonicalize_name(name): Version(version) for name, version in lines}
    for name, version in lowest_versions().items():
        assert installed[canonicalize_name(name)] == Version(version), name


@pytest.mark.parametrize("words", [["--version"], ["--help"], ["server", "--help"]])
def test_the_command_line_works(lowest: Installation, words: list[str]) -> None:
    done = run(lowest, "-m", "fairfleet.common.cli", *words)
    assert done.returncode == 0, done.stderr


def test_every_module_can_be_imported(lowest: Installation) -> None:
    done = run(lowest, "-c", IMPORT_EVERYTHING, *OTHER_EXTRAS)
    assert done.returncode == 0, done.stderr


def test_a_federation_trains(lowest: Installation, fleet: Fleet) -> None:
    fleet.init()
    fleet.start_server(rounds=3)
    for name in ("first", "second"):
        fleet.start_client(name)
    assert fleet.wait_clients() == {"first": 0, "second": 0}
    fleet.stop_server()
    fleet.prove(3)
