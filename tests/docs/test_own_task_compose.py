"""The compose file of docs/how-to/own-task-compose.md fits schema, settings and demo."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from tests.deploy.settings import client_settings, server_settings
from tests.support.paths import ROOT

PAGE = ROOT / "docs" / "how-to" / "own-task-compose.md"


def block(language: str, sign: str) -> str:
    """Return the block of the page that contains a text."""
    blocks = re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    (text,) = [text for text in blocks if sign in text]
    return str(text)


@pytest.fixture
def services() -> dict[str, dict[str, Any]]:
    services: dict[str, dict[str, Any]] = yaml.safe_load(block("yaml", "x-hardened"))["services"]
    return services


def test_the_compose_file_fits_the_schema(tmp_path: Path) -> None:
    program = shutil.which("check-jsonschema", path=str(Path(sys.executable).parent))
    assert program
    file = tmp_path / "compose.yaml"
    file.write_text(block("yaml", "x-hardened"))
    command = [program, "--builtin-schema", "vendor.compose-spec", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_its_variables_are_settings(
    services: dict[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = server_settings(services["server"]["environment"], monkeypatch)
    assert server.rule.name == "fedlf"
    client = client_settings(services["client"]["environment"], monkeypatch)
    assert client.options == {"part": "{replica}"}


def test_its_volumes_are_declared_and_its_folders_are_those_of_the_demo(
    services: dict[str, dict[str, Any]],
) -> None:
    declared = yaml.safe_load(block("yaml", "x-hardened"))["volumes"]
    demo = (ROOT / "docker-compose.yml").read_text()
    for service in services.values():
        for volume in service["volumes"]:
            source, target, *_ = volume.split(":")
            assert source in declared or source.startswith("./"), volume
            assert source.startswith("./") or f"{source}:{target}" in demo, volume


def test_the_task_of_the_page_reads_the_data_of_its_part(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    (tmp_path / "0").mkdir()
    x, y = random.normal(size=(60, 12)).astype(np.float32), random.integers(0, 4, 60)
    np.savez(tmp_path / "0" / "readings.npz", x=x, y=y)
    source = block("python", "import SoftmaxTask").replace("/data/", f"{tmp_path}/")
    names: dict[str, Any] = {}
    exec(compile(source, "my_task.py", "exec"), names)
    task = names["task"]("0")
    assert (task.train_samples, task.test_samples) == (48, 12)
