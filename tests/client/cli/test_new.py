"""`fairfleet new` writes projects that run at once, with real processes and without a network."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from fairfleet.client.cli.new import TEMPLATES, template_names
from fairfleet.common.tensors import Model
from tests.support.program import run_in_process

# PyTorch takes seconds to import, in each process.
SLOW_TORCH = (pytest.mark.torch, pytest.mark.slow)
FEDERATIONS = ("numpy", pytest.param("torch", marks=SLOW_TORCH))


def scaffold(folder: Path, template: str, name: str = "My-project") -> Path:
    done = run_in_process("new", name, "--template", template, folder=folder)
    assert done.returncode == 0, done.stderr
    return folder / name


def run_python(
    folder: Path, *words: str, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run Python in the folder of a project, as its user does; expect success."""
    done = subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env={**os.environ, **(environment or {})},
        text=True,
        capture_output=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def test_every_template_has_a_test_here() -> None:
    assert template_names() == ["numpy", "rule", "torch"]


@pytest.mark.parametrize("template", template_names())
def test_nothing_of_the_placeholders_is_left(tmp_path: Path, template: str) -> None:
    project = scaffold(tmp_path, template)
    names = {str(file.relative_to(project)) for file in project.rglob("*") if file.is_file()}
    assert "README.md" in names
    assert not [name for name in names if "__pycache__" in name]
    for name in names:
        text = name + (project / name).read_text("utf-8")
        assert "project_name" not in text
        assert "project-name" not in text
    assert (project / "README.md").read_text("utf-8").startswith("# My-project\n")


def test_a_folder_is_a_template_and_what_python_compiled_there_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pip compiles the files of a template when it installs FairFleet."""
    templates = tmp_path / "templates"
    shutil.copytree(TEMPLATES / "numpy", templates / "jax")
    (templates / "jax" / "__pycache__").mkdir()
    (templates / "jax" / "__pycache__" / "task.cpython-311.pyc").write_bytes(b"\xff\x00")
    monkeypatch.setattr("fairfleet.client.cli.new.TEMPLATES", templates)
    project = scaffold(tmp_path, "jax", "mine")
    expected = {file.name for file in (TEMPLATES / "numpy").iterdir() if file.is_file()}
    assert {file.name for file in project.iterdir()} == expected


@pytest.mark.parametrize("template", template_names())
def test_the_next_steps_are_commands_of_the_project(tmp_path: Path, template: str) -> None:
    done = run_in_process("new", "mine", "--template", template, folder=tmp_path)
    steps = [line.strip() for line in done.stdout.partition("Next steps:")[2].split("\n") if line]
    assert steps[:2] == ["cd mine", "cat README.md"]
    programs = [step.removeprefix("python ") for step in steps[2:]]
    assert "-m unittest" in programs
    assert all((tmp_path / "mine" / p).is_file() for p in programs if not p.startswith("-"))


@pytest.mark.parametrize("template", [*FEDERATIONS, "rule"])
def test_a_projects_own_test_passes(tmp_path: Path, template: str) -> None:
    done = run_python(scaffold(tmp_path, template), "-m", "unittest")
    assert "OK" in done.stderr
    assert "Ran 0 tests" not in done.stderr


@pytest.mark.parametrize(
    ("template", "old", "new"),
    [
        ("numpy", "weight -= ", "weight += "),
        ("rule", "** self.power", "** (2 * self.power)"),
        pytest.param("torch", "x[client::clients]", "x[::clients] * 0", marks=SLOW_TORCH),
    ],
)
def test_a_projects_own_test_fails_on_a_mistake(
    tmp_path: Path, template: str, old: str, new: str
) -> None:
    project = scaffold(tmp_path, template, "mine")
    file = project / ("mine.py" if template == "rule" else "task.py")
    assert old in file.read_text("utf-8")
    file.write_text(file.read_text("utf-8").replace(old, new), "utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "unittest"], cwd=project, capture_output=True, check=False
    )
    assert done.returncode == 1, done.stderr


def test_the_rule_serves_the_worst_client_better_than_averaging(tmp_path: Path) -> None:
    done = run_python(scaffold(tmp_path, "rule", "mine"), "compare.py", "--rounds", "30")
    worst = {line.split()[0]: line.split()[2] for line in done.stdout.splitlines()[1:]}
    assert float(worst["mine"].rstrip("%")) > float(worst["fedavg"].rstrip("%")) + 10


@pytest.mark.slow
@pytest.mark.parametrize("template", FEDERATIONS)
def test_a_project_trains_in_a_federation_of_real_processes(tmp_path: Path, template: str) -> None:
    project = scaffold(tmp_path, template)
    done = run_python(project, "run.py", "--clients", "2", "--rounds", "5")
    assert "5 rounds of 5 done" in done.stdout
    assert all(f"client-{client}  " in done.stdout for client in range(2))
    initial, trained = (
        Model.load(project / "fairfleet-run" / f"{name}.safetensors")[0]
        for name in ("initial", "trained")
    )
    assert initial.signature == trained.signature
    assert (initial.parameters != trained.parameters).any()


@pytest.mark.slow
def test_an_installed_rule_is_listed_and_leads_a_federation(tmp_path: Path) -> None:
    rule, site = scaffold(tmp_path, "rule", "my-rule"), tmp_path / "site"
    install = ("-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation")
    run_python(rule, *install, "--no-index", "--target", str(site), ".")
    installed = {"PYTHONPATH": str(site)}
    listed = run_python(
        tmp_path, "-m", "fairfleet.common.cli", "rules", "--json", environment=installed
    )
    assert json.loads(listed.stdout)["my_rule"]["parameters"]["power"] == 1.0

    project = scaffold(tmp_path, "numpy", "mine")
    settings = project / "federation.yaml"
    own = settings.read_text("utf-8").replace("{name: fedlf}", "{name: my_rule, power: 2}")
    settings.write_text(own, "utf-8")
    done = run_python(project, "run.py", "--clients", "2", "--rounds", "2", environment=installed)
    assert "my_rule" in done.stdout
    assert "2 rounds of 2 done" in done.stdout


def test_a_failing_client_ends_the_run_with_its_log(tmp_path: Path) -> None:
    project, data = scaffold(tmp_path, "numpy"), tmp_path / "data"
    data.mkdir()
    np.savez(data / "client-0.npz", x=np.ones((10, 4)), y=np.arange(10))
    done = subprocess.run(
        [sys.executable, "run.py", "--clients", "2", "--data-dir", str(data)],
        cwd=project,
        text=True,
        capture_output=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1
    assert "client-1 ended with code 1. Its log:" in done.stderr
    assert "client-1.npz" in done.stderr


def test_both_federations_are_run_by_the_same_program() -> None:
    numpy, torch = (TEMPLATES / name / "run.py" for name in ("numpy", "torch"))
    assert numpy.read_text("utf-8") == torch.read_text("utf-8")


@pytest.mark.parametrize("name", ["../up", "", "9lives", "a b", "-x", "x" * 65])
def test_a_bad_name_is_refused(tmp_path: Path, name: str) -> None:
    done = run_in_process("new", "--", name, folder=tmp_path)
    assert done.returncode == 2
    assert "cannot name a project: expected a letter" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["json", "class", "fairfleet", "Test"])
def test_the_name_of_a_python_module_is_refused(tmp_path: Path, name: str) -> None:
    done = run_in_process("new", name, folder=tmp_path)
    assert done.returncode == 2
    assert f"choose another, for example my-{name}" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_an_existing_folder_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    done = run_in_process("new", "mine", folder=tmp_path)
    assert done.returncode == 2
    assert "mine exists already; choose another name, or remove it first" in done.stderr
    assert list((tmp_path / "mine").iterdir()) == []


def test_an_unknown_template_is_refused_with_the_nearest_one(tmp_path: Path) -> None:
    done = run_in_process("new", "mine", "--template", "tourch", folder=tmp_path)
    assert done.returncode == 2
    assert "did you mean 'torch'? There are: numpy, rule, torch" in done.stderr
    assert list(tmp_path.iterdir()) == []
