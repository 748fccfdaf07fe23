"""A command whose optional library is missing says so in one line, with what to run."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from fairfleet.common.extras import LIBRARIES
from tests.support.paths import ROOT

WITHOUT = """
import sys
sys.modules.update(dict.fromkeys(sys.argv.pop(1).split()))
from fairfleet.common.cli.main import main
main()
"""
PRIVATE = "--set privacy.where=client --set privacy.clip=1 --set privacy.noise_multiplier=1"
CALLS = [
    ("sklearn", "demo", "lab"),
    ("sqlalchemy", "demo", "lab"),
    ("torch", "demo --task torch-mlp", "torch"),
    ("sklearn", "partition digits iid --clients 3", "lab"),
    ("matplotlib", "partition digits iid --clients 3 --picture it.png", "plots"),
    ("PIL", "partition images iid --clients 3", "plots"),
    ("torch", "simulate", "lab,torch"),
    ("matplotlib plotly", "compare --rule fedavg", "plots"),
    ("torch", "reproduce", "lab,torch"),
    ("prometheus_client", "client --task my_task:task --metrics 127.0.0.1:0", "metrics"),
    ("torch", "init --task my_task:task", "torch"),
    ("sqlalchemy", "server", "server"),
    ("dp_accounting", f"server --model m.safetensors {PRIVATE}", "privacy"),
    ("tensorboardX", "server --model m.safetensors --tensorboard events", "tensorboard"),
    ("tensorboardX", "simulate --rounds 1 --tensorboard events", "tensorboard"),
]


@pytest.mark.parametrize(("absent", "words", "extras"), CALLS)
def test_a_missing_library_is_one_line_with_the_command_to_run(
    absent: str, words: str, extras: str, tmp_path: Path
) -> None:
    (tmp_path / "my_task.py").write_text("import torch\n")
    (tmp_path / "images" / "class").mkdir(parents=True)
    (tmp_path / "images" / "class" / "a.png").write_bytes(b"")
    before = sorted(path.name for path in tmp_path.iterdir())
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT, absent, *words.split()],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    lines = [line for line in done.stderr.splitlines() if "error" in line]
    assert len(lines) == 1, done.stderr
    assert "Traceback" not in done.stderr
    for module in absent.split():
        assert LIBRARIES[module].name in lines[0]
    assert f"{sys.executable} -m pip install 'fairfleet[{extras}]'" in lines[0]
    after = sorted(path.name for path in tmp_path.iterdir() if path.name != "__pycache__")
    assert after == before, "a command that cannot run leaves nothing behind"


def test_each_library_is_in_the_extra_that_is_advised() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for library in LIBRARIES.values():
        requirements = project["optional-dependencies"][library.extra]
        assert library.name in {Requirement(line).name for line in requirements}, library


def test_no_library_of_an_extra_is_forgotten() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    runtime = {
        Requirement(line).name
        for name, lines in project["optional-dependencies"].items()
        if name not in ("docs", "dev", "dev-lite")
        for line in lines
    }
    assert runtime - {"fairfleet"} == {library.name for library in LIBRARIES.values()}
