"""No data that is read can run code: there is no pickle on the wire or on the disk."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.paths import ROOT

SOURCES = [
    path
    for part in ("proto", "common", "server", "client", "lab")
    for path in (ROOT / part).rglob("*.py")
]
FORBIDDEN = {"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
# This module reads the published CIFAR archives with an unpickler that can make only arrays of
# bytes, which its own tests check. It belongs to the lab, so no server or client uses it.
# The other one passes a user's Dataset to the worker processes that it starts, as multiprocessing
# does for every object. These bytes come neither from a file nor from the network.
ALLOWED = {
    ("lab/fairfleet/lab/datasets/cifar.py", "pickle"),
    ("client/fairfleet/client/training/torch_data.py", "pickle"),
}


def offences(path: Path, tree: ast.AST) -> Iterator[tuple[str, str]]:
    name = str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(path)
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from (
                    (name, alias.name) for alias in names if alias.name.split(".")[0] in FORBIDDEN
                )
            case ast.ImportFrom(module=str(module)) if module.split(".")[0] in FORBIDDEN:
                yield name, module
            case ast.Call(func=ast.Name(id="eval" | "exec" | "compile" as called)):
                yield name, called
            case ast.Call(
                func=ast.Attribute(value=ast.Name(id=module), attr="load"), keywords=keywords
            ):
                if not _is_safe(module, {word.arg: word.value for word in keywords}):
                    yield name, f"{module}.load"
            case ast.Call(
                func=ast.Attribute(
                    value=ast.Name(id="yaml"), attr="load_all" | "unsafe_load" as called
                )
            ):
                yield name, f"yaml.{called}"


def _is_safe(module: str, words: dict[str | None, ast.expr]) -> bool:
    """Return whether a call of `load` cannot run code, from its module and its arguments."""

    def says(word: str, value: bool) -> bool:
        argument = words.get(word)
        return isinstance(argument, ast.Constant) and argument.value is value

    match module:
        case "torch":
            return says("weights_only", True)
        case "np" | "numpy":
            return says("allow_pickle", False)
        case "yaml":
            return False
    return True


def test_no_module_reads_data_that_can_run_code() -> None:
    offending = {
        offence for path in SOURCES for offence in offences(path, ast.parse(path.read_text()))
    }
    assert len(SOURCES) > 100
    assert offending == ALLOWED


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
def test_the_search_detects_each_unsafe_call(code: str) -> None:
    assert list(offences(Path("/x.py"), ast.parse(code)))
