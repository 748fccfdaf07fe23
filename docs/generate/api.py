"""The page of the public Python API, from the sources alone: nothing is imported, not even torch.

A package's public names are those in its `__all__`; of a module without one, they are its functions
and classes without a leading underscore.
"""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from docs.generate.markdown import GENERATED

ROOT = Path(__file__).resolve().parents[2]
WIDTH = 88
SECTION = re.compile(r"(Attributes|Args|Raises):$")
ITEM = re.compile(r"^(\w+): ")
MODULES = (
    "fairfleet.client",
    "fairfleet.server.rules",
    "fairfleet.server.aggregation",
    "fairfleet.common.codecs",
    "fairfleet.common.fairness",
    "fairfleet.lab.datasets",
    "fairfleet.lab.models",
    "fairfleet.lab.digits",
)
Function = ast.FunctionDef | ast.AsyncFunctionDef
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Assign | ast.AnnAssign
OPENING = """# Python API

These are the modules that stay stable between versions ([stability](stability.md)). All others are
internal. The page is made from the sources.
"""


def api_page() -> str:
    """Return the Markdown page of the public Python API."""
    lines = [GENERATED, OPENING]
    for module in MODULES:
        lines += [f"## {module}", "", _docstring(parse(module)), ""]
        for name in public_names(module):
            lines += _entry(name, module, definition(module, name))
    return _formatted("\n".join(lines))


def _formatted(page: str) -> str:
    """Return the page with its code in the style of the project, as `ruff format` checks it."""
    command = [sys.executable, "-m", "ruff", "format", "--stdin-filename", "python-api.md", "-"]
    return subprocess.run(
        command, input=page, cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout


def parse(module: str) -> ast.Module:
    """Return the syntax tree of a module of this project."""
    _, part, *rest = module.split(".")
    path = ROOT.joinpath(part, "fairfleet", part, *rest)
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.parse(file.read_text(encoding="utf-8"))


def public_names(module: str) -> list[str]:
    """Return the public names of a module, in the order in which they are listed or defined."""
    tree = parse(module)
    for statement in tree.body:
        if isinstance(statement, ast.Assign) and _targets(statement) == ["__all__"]:
            names: list[str] = ast.literal_eval(statement.value)
            return names
    defined = [item for item in tree.body if isinstance(item, Function | ast.ClassDef)]
    return [item.name for item in defined if not item.name.startswith("_")]


def definition(module: str, name: str) -> Definition:
    """Return the definition of a name that a module defines or imports."""
    for node in ast.walk(parse(module)):
        if isinstance(node, ast.ImportFrom) and name in [each.name for each in node.names]:
            return definition(str(node.module), name)
    for statement in parse(module).body:
        if isinstance(statement, Definition) and name in _targets(statement):
            return statement
    raise LookupError(f"{module} exports {name}, but neither defines nor imports it")


def _targets(statement: Definition) -> list[str]:
    if isinstance(statement, ast.Assign):
        return [target.id for target in statement.targets if isinstance(target, ast.Name)]
    if isinstance(statement, ast.AnnAssign):
        return [ast.unparse(statement.target)]
    return [statement.name]


def _entry(name: str, module: str, node: Definition) -> Iterator[str]:
    yield from (f"### {name}", "", "```python", f"from {module} import {name}", "")
    if isinstance(node, ast.ClassDef):
        yield from _class(node)
    elif isinstance(node, Function):
        yield _signature(node)
    else:
        yield ast.unparse(node)
    yield from ("```", "")
    if isinstance(node, ast.ClassDef | Function):
        yield from (_docstring(node), "")
    if isinstance(node, ast.ClassDef):
        for method in _methods(node):
            yield from (f"**`{_signature(method, bound=True)}`**", "", _docstring(method), "")


def _class(node: ast.ClassDef) -> Iterator[str]:
    bases = [ast.unparse(base) for base in node.bases]
    yield f"class {node.name}({', '.join(bases)}):" if bases else f"class {node.name}:"
    fields = [item for item in node.body if isinstance(item, ast.AnnAssign)]
    public = [field for field in fields if not ast.unparse(field.target).startswith("_")]
    creators = [
        item for item in node.body if isinstance(item, Function) and item.name == "__init__"
    ]
    for field in public:
        yield f"    {ast.unparse(field)}"
    for creator in creators:
        yield from (f"    {line}" for line in _signature(creator).splitlines())
    if not public and not creators:
        yield "    ..."


def _methods(node: ast.ClassDef) -> Iterator[Function]:
    for item in node.body:
        if isinstance(item, Function) and not item.name.startswith("_"):
            yield item


def _signature(node: Function, bound: bool = False) -> str:
    arguments = ast.unparse(node.args)
    if bound:
        arguments = arguments.removeprefix("self").removeprefix("cls").removeprefix(", ")
    result = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    line = f"{node.name}({arguments}){result}"
    if bound or len(line) <= WIDTH:
        return line
    return f"{node.name}(\n    {_one_per_line(node.args)},\n){result}"


def _one_per_line(arguments: ast.arguments) -> str:
    pieces, depth, current = [], 0, ""
    for character in ast.unparse(arguments):
        depth += (character in "([{") - (character in ")]}")
        if character == "," and not depth:
            pieces.append(current.strip())
            current = ""
        else:
            current += character
    return ",\n    ".join([*pieces, current.strip()])


def _docstring(node: ast.Module | ast.ClassDef | Function) -> str:
    """Return a docstring in Markdown: its sections, such as "Attributes:", become lists."""
    text = ast.get_docstring(node, clean=False)
    lines = inspect.cleandoc(text).splitlines() if text else []
    return "\n".join(_sections_as_lists(lines))


def _sections_as_lists(lines: list[str]) -> Iterator[str]:
    in_section = False
    for line in lines:
        if SECTION.match(line):
            in_section = True
            yield from (line, "")
        elif in_section and line.startswith("    "):
            yield ITEM.sub(r"- `\1`: ", line.removeprefix("    "))
        else:
            in_section = in_section and not line
            yield line
