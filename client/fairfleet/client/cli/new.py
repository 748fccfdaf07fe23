"""`fairfleet new`: write a small project that runs at once, as a beginning for one's own.

Every folder in `templates/` is a template. Its files are copied. In their names and texts
`project-name` becomes the name of the project, and `project_name` that name as a Python module. The
second paragraph of a template's README.md describes it.
"""

from __future__ import annotations

import keyword
import re
import sys
from collections.abc import Iterator
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated

import typer

from fairfleet.common.errors import UsageError, short

TEMPLATES = Path(__file__).with_name("templates")
DEFAULT = "numpy"
NAME, MODULE = "project-name", "project_name"  # what is replaced in the files of a template
MAX_CHARS = 64
_ALLOWED = re.compile(rf"[A-Za-z][A-Za-z0-9_-]{{0,{MAX_CHARS - 1}}}")


def template_names() -> list[str]:
    """Return the names of the templates."""
    return sorted(folder.name for folder in TEMPLATES.iterdir() if folder.is_dir())


def new(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the project's folder.")],
    template: Annotated[
        str, typer.Option(help=f"What to begin with: {', '.join(template_names())}.")
    ] = DEFAULT,
) -> None:
    """Write a small project of your own, which runs at once.

    It is written to the folder NAME in the current directory. Its data are images that come with
    scikit-learn, so it needs no download. It has a README and a test.

    Examples:

      fairfleet new my-task

      fairfleet new my-network --template torch

      fairfleet new my-rule --template rule
    """
    module = _module_name(name)
    source = _template_folder(template)
    target = Path(name)
    _write(source, target, {NAME: name, MODULE: module})
    print(f"{target}: {_description(target)}")
    print(f"\nNext steps:\n\n  cd {name}\n  cat README.md")
    for command in _commands(target):
        print(f"  {command}")


def _module_name(name: str) -> str:
    """Return the project's name as a Python module. Raises UsageError if it cannot be one."""
    if not _ALLOWED.fullmatch(name):
        raise UsageError(
            f"{short(repr(name))} cannot name a project: expected a letter, then letters, digits, "
            f"- or _, at most {MAX_CHARS} characters, for example my-task"
        )
    module = name.lower().replace("-", "_")
    if keyword.iskeyword(module) or module in {*sys.stdlib_module_names, "fairfleet", "test"}:
        raise UsageError(
            f"{name!r} cannot name a project, because Python has a module or keyword of that name; "
            f"choose another, for example my-{name}"
        )
    return module


def _template_folder(template: str) -> Path:
    names = template_names()
    if template not in names:
        close = get_close_matches(template, names, 1, cutoff=0.5)
        advice = f"did you mean {close[0]!r}? " if close else ""
        raise UsageError(
            f"there is no template {short(repr(template))}; {advice}There are: {', '.join(names)}"
        )
    return TEMPLATES / template


def _write(source: Path, target: Path, replacements: dict[str, str]) -> None:
    """Copy a template. Raises UsageError if the folder exists or cannot be written."""
    try:
        target.mkdir()
        for file in _files(source):
            copy = target / _replaced(str(file.relative_to(source)), replacements)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_text(_replaced(file.read_text("utf-8"), replacements), "utf-8")
    except FileExistsError:
        raise UsageError(
            f"{target} exists already; choose another name, or remove it first"
        ) from None
    except OSError as error:
        raise UsageError(f"cannot write {target}: {error.strerror}") from error


def _files(source: Path) -> Iterator[Path]:
    """Yield the files of a template, without what Python compiled when FairFleet was installed."""
    for file in sorted(source.rglob("*")):
        if file.is_file() and "__pycache__" not in file.parts:
            yield file


def _replaced(text: str, replacements: dict[str, str]) -> str:
    for old, replacement in replacements.items():
        text = text.replace(old, replacement)
    return text


def _description(project: Path) -> str:
    """Return the second paragraph of a project's README in one line."""
    return " ".join(_readme(project).split("\n\n")[1].split())


def _commands(project: Path) -> list[str]:
    """Return the commands in the first code block of a project's README."""
    block = _readme(project).split("```sh\n")[1].split("```")[0]
    return [line for line in block.splitlines() if line and not line.startswith("#")]


def _readme(project: Path) -> str:
    return (project / "README.md").read_text("utf-8")
