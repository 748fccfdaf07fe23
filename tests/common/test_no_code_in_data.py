"""Nothing that is read can run: no pickle and no relatives of it, neither on the wire nor on the disk."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = [path for part in ("proto", "common", "server", "client", "lab") for path in (ROOT / part).rglob("*.py")]
FORBIDDEN = {"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
# Reads the archives that CIFAR is published as, with an unpickler that can make arrays of bytes and nothing else; its
# own tests show that. No server or client has it: it belongs to the lab.
ALLOWED = {("lab/fairfleet/lab/datasets/cifar.py", "pickle")}


def offences(path: Path, tree: ast.AST) -> Iterator[tuple[str, str]]:
    name = str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(path)
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from ((name, one.name) for one in names if one.name.split(".")[0] in FORBIDDEN)
            case ast.ImportFrom(module=str(module)) if module.split(".")[0] in FORBIDDEN:
                yield name, module
            case ast.Call(func=ast.Name(id="eval" | "exec" | "compile" as called)):
                yield name, called
            case ast.Call(func=ast.Attribute(value=ast.Name(id=module), attr="load"), keywords=keywords):
                if not _is_safe(module, {word.arg: word.value for word in keywords}):
                    yield name, f"{module}.load"
            case ast.Call(func=ast.Attribute(value=ast.Name(id="yaml"), attr="load_all" | "unsafe_load" as called)):
                yield name, f"yaml.{called}"


def _is_safe(module: str, words: dict[str | None, ast.expr]) -> bool:
    """Which `load` it is, and what it is told."""

    def says(word: str, value: bool) -> bool:
        found = words.get(word)
        return isinstance(found, ast.Constant) and found.value is value

    match module:
        case "torch":
            return says("weights_only", True)
        case "np" | "numpy":
            return says("allow_pickle", False)
        case "yaml":
            return False
    return True


def test_no_module_reads_what_could_run() -> None:
    found = {offence for path in SOURCES for offence in offences(path, ast.parse(path.read_text()))}
    assert len(SOURCES) > 100
    assert found == ALLOWED


@pytest.mark.parametrize(
    "code",
    [
        "import pickle",
        "from pickle import loads",
        "import shelve, os",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "np.load(path)",
        "np.load(path, allow_pickle=True)",
        "yaml.load(text, Loader)",
        "eval(text)",
        "exec(text)",
    ],
)
def test_the_search_finds_each_of_them(code: str) -> None:
    assert list(offences(Path("/x.py"), ast.parse(code)))
