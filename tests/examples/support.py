"""Copies an example to a folder of its own, and runs it there as its reader does."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

import pytest

from fairfleet.common.tensors import Model
from tests.support.paths import ROOT

EXAMPLES = ROOT / "examples"
WRITTEN = shutil.ignore_patterns(
    "__pycache__", "fairfleet-run", "data", "*.safetensors", "machines", ".env"
)
REAL = os.environ.get("FAIRFLEET_DATA", "")
needs_real_data = pytest.mark.skipif(
    not REAL, reason="FAIRFLEET_DATA names no folder with the published datasets"
)


def copied(example: str, folder: Path) -> Path:
    """Return a copy of an example, without what earlier runs wrote."""
    return Path(shutil.copytree(EXAMPLES / example, folder / example, ignore=WRITTEN))


def module_of(file: Path) -> ModuleType:
    """Import a module of an example under a name of its own."""
    name = "_".join(file.relative_to(EXAMPLES).with_suffix("").parts).replace("-", "_")
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def run_python(
    folder: Path, *words: str, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run Python in the folder of an example, and expect success."""
    inherited = {name: text for name, text in os.environ.items() if name != "FAIRFLEET_DATA"}
    done = subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env={**inherited, **(environment or {})},
        text=True,
        capture_output=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def accuracies(status: str) -> dict[str, float]:
    """Return each client's accuracy in percent, from the output of `fairfleet status`."""
    rows = [line.split() for line in status.splitlines() if line.startswith("  client-")]
    return {row[0]: float(row[row.index("%") - 1]) for row in rows}


def check_trained(example: Path) -> None:
    """Check that the model of a run differs from the untrained one."""
    initial, trained = (
        Model.load(example / "fairfleet-run" / f"{name}.safetensors")[0]
        for name in ("initial", "trained")
    )
    assert initial.signature == trained.signature
    assert (initial.parameters != trained.parameters).any()
