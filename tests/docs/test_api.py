"""The page of the Python API has every public name, and is made without importing torch."""

from __future__ import annotations

import ast
import re
import subprocess
import sys

import pytest

from docs.generate.api import MODULES, api_page, definition, public_names
from tests.support.paths import ROOT

STABILITY = ROOT / "docs" / "reference" / "stability.md"


@pytest.mark.parametrize("module", MODULES)
def test_every_public_name_is_described(module: str) -> None:
    names = public_names(module)
    assert names
    for name in names:
        node = definition(module, name)
        assert not isinstance(node, ast.ClassDef | ast.FunctionDef) or ast.get_docstring(node), name


def test_the_page_has_every_module_that_is_promised_to_be_stable() -> None:
    promised = re.search(
        r"The public Python modules are (.*?)\. \[Python", STABILITY.read_text(), re.DOTALL
    )
    assert promised
    modules = re.findall(r"`(fairfleet[\w.]+)`", promised[1])
    assert set(MODULES) <= set(modules)
    for module in modules:
        assert module in MODULES or module.rpartition(".")[0] in MODULES, module


def test_the_page_is_made_without_torch() -> None:
    script = (
        "import sys; sys.modules['torch'] = None; from docs.generate import api; api.api_page()"
    )
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True, timeout=60)
    assert "### TorchTask" in api_page()
