"""The repository's shape: what imports what, and that the generated code is that of the .proto files."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PARTS = ("proto", "common", "server", "client", "lab")
FORBIDDEN = {
    "proto": {"common", "server", "client", "lab"},
    "common": {"server", "client", "lab"},
    "server": {"client", "lab"},
    "client": {"server", "lab"},
    "lab": set(),
}


def imported_parts(part: str) -> set[str]:
    """The other parts that the modules of a part import, at any depth of their code."""
    found = set()
    for path in (ROOT / part / "fairfleet" / part).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            found |= {name.split(".")[1] for name in names if name.startswith("fairfleet.")}
    return found


def test_no_part_hides_the_others_by_an_init_at_the_top() -> None:
    assert not [part for part in PARTS if (ROOT / part / "fairfleet" / "__init__.py").exists()]


@pytest.mark.parametrize("part", PARTS)
def test_every_part_is_importable_and_typed(part: str) -> None:
    module = importlib.import_module(f"fairfleet.{part}")
    assert module.__file__ is not None
    assert (Path(module.__file__).parent / "py.typed").exists()


@pytest.mark.parametrize("part", PARTS)
def test_imports_point_one_way(part: str) -> None:
    assert not imported_parts(part) & FORBIDDEN[part]


def test_the_server_and_the_client_core_do_not_import_torch() -> None:
    code = (
        "import sys, fairfleet.server.commands, fairfleet.client.commands, fairfleet.client.agent; "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_committed_stubs_match_the_proto_files(tmp_path: Path) -> None:
    subprocess.run([sys.executable, str(ROOT / "proto/generate.py"), str(tmp_path)], check=True, capture_output=True)
    made = {path.relative_to(tmp_path): path.read_text() for path in tmp_path.rglob("*_pb2*")}
    kept = {path.relative_to(ROOT / "proto"): path.read_text() for path in (ROOT / "proto").rglob("*_pb2*.py*")}
    kept = {path: text for path, text in kept.items() if "__pycache__" not in path.parts}
    assert made == kept, "run `make proto`"
