"""The layout of the repository: packages, layers, folder sizes and generated code."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.support.paths import ROOT

PARTS = ("proto", "common", "server", "client", "lab")
LARGEST_FOLDER = 20  # modules


def test_no_part_has_an_init_at_the_top_that_hides_the_others() -> None:
    assert not [part for part in PARTS if (ROOT / part / "fairfleet" / "__init__.py").exists()]


@pytest.mark.parametrize("part", PARTS)
def test_every_part_is_importable_and_typed(part: str) -> None:
    module = importlib.import_module(f"fairfleet.{part}")
    assert module.__file__ is not None
    assert (Path(module.__file__).parent / "py.typed").exists()


def test_every_package_imports_only_from_the_layers_below_it() -> None:
    """The layers are in pyproject.toml."""
    command = [Path(sys.executable).with_name("lint-imports"), "--no-cache"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_no_folder_has_too_many_modules() -> None:
    modules = [path for part in (*PARTS, "tests") for path in (ROOT / part).rglob("*.py")]
    folders = Counter(
        path.parent for path in modules if path.name != "__init__.py" and "_pb2" not in path.name
    )
    assert {str(folder): count for folder, count in folders.items() if count > LARGEST_FOLDER} == {}


def test_the_server_and_the_client_core_do_not_import_torch() -> None:
    code = (
        "import sys, fairfleet.server.cli.server; "
        "import fairfleet.client.cli.client, fairfleet.client.agent.agent; "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_committed_stubs_match_the_proto_files(tmp_path: Path) -> None:
    """The compiler has its own environment, which `make test` creates."""
    compiler = ROOT / ".protogen/bin/python"
    if not compiler.exists() and "CI" not in os.environ:
        pytest.skip("no protobuf compiler: make .protogen/.installed")
    subprocess.run(
        [compiler, ROOT / "proto/generate.py", tmp_path], check=True, capture_output=True
    )
    assert stubs(ROOT / "proto") == stubs(tmp_path), "run `make proto`"


def stubs(folder: Path) -> dict[Path, str]:
    """Return the text of every generated file below a folder, by its relative path."""
    return {
        path.relative_to(folder): path.read_text(encoding="utf-8")
        for path in folder.rglob("*_pb2*.py*")
        if "__pycache__" not in path.parts
    }
