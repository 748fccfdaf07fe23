"""The page of all commands, from the same declarations as `fairfleet COMMAND --help`."""

from __future__ import annotations

import typing
from collections.abc import Iterator
from enum import Enum
from typing import Literal

import typer
from typer.core import TyperArgument, TyperCommand, TyperGroup, TyperOption

from docs.generate.markdown import GENERATED, NAMES, cell, table
from fairfleet.common.cli.command_list import GROUPS
from fairfleet.common.cli.program import program


def commands_page() -> str:
    """Return the Markdown page of all commands, in the groups of `fairfleet --help`."""
    lines = [
        GENERATED,
        "# Commands",
        "",
        "`fairfleet COMMAND --help` shows the same text. `fairfleet --version` prints the version.",
        "Every command that prints a result for programs has `--json`.",
        "",
    ]
    for group, summaries in GROUPS.items():
        lines += [f"## {group}", ""]
        for summary in summaries:
            root = typer.main.get_command(program(summary.name))
            assert isinstance(root, TyperGroup)
            lines += _command(root.commands[summary.name], f"fairfleet {summary.name}", 3)
    return "\n".join(lines)


def _command(command: TyperCommand | TyperGroup, path: str, level: int) -> list[str]:
    lines = [f"{'#' * level} `{path}`", "", *_help(command)]
    arguments = [each for each in command.params if isinstance(each, TyperArgument)]
    usage = " ".join([path, *(_usage(argument) for argument in arguments)])
    if isinstance(command, TyperGroup):
        usage += " COMMAND"
    lines += ["```text", f"{usage} [OPTIONS]", "```", ""]
    rows = [row for parameter in command.params for row in _row(parameter)]
    if rows:
        lines += [*table(("option", "values", "default", "meaning"), rows), ""]
    if isinstance(command, TyperGroup):
        for name, child in command.commands.items():
            lines += _command(child, f"{path} {name}", level + 1)
    return lines


def _help(command: TyperCommand | TyperGroup) -> Iterator[str]:
    """Yield the help text. A paragraph after a backspace character keeps its lines: examples."""
    for paragraph in (command.help or "").split("\n\n"):
        if not (text := paragraph.strip("\n")) or text == "\b":
            continue
        if not text.startswith("\b"):
            yield from (" ".join(text.split()), "")
            continue
        first, *examples = text.strip("\b\n").splitlines()
        yield from (first, "")
        if examples:
            yield from ("```bash", *(line.strip("\b").strip() for line in examples), "```", "")


def _usage(argument: TyperArgument) -> str:
    name = _argument_name(argument)
    return name if argument.required else f"[{name}]"


def _argument_name(argument: TyperArgument) -> str:
    return argument.metavar or (argument.name or "").upper()


def _row(parameter: TyperArgument | TyperOption) -> Iterator[tuple[str, str, str, str]]:
    options = [*parameter.opts, *parameter.secondary_opts]
    if parameter.hidden or "--help" in options:
        return
    if isinstance(parameter, TyperArgument):
        name = _argument_name(parameter)
    else:
        name = ", ".join(f"`{option}`" for option in options)
    yield name, cell(_values(parameter)), cell(_default(parameter)), cell(parameter.help or "")


def _values(parameter: TyperArgument | TyperOption) -> str:
    if getattr(parameter, "is_flag", False):
        return "flag"
    if isinstance(parameter, TyperOption) and parameter.metavar:
        return parameter.metavar
    kind = parameter.type_descriptor.annotation
    if isinstance(kind, type) and issubclass(kind, Enum):
        return ", ".join(f"`{choice.value}`" for choice in kind)
    if typing.get_origin(kind) is Literal:
        return ", ".join(f"`{choice}`" for choice in typing.get_args(kind))
    return NAMES.get(kind, "")


def _default(parameter: TyperArgument | TyperOption) -> str:
    if isinstance(parameter.show_default, str):
        return parameter.show_default
    if parameter.required:
        return "required"
    if parameter.default is None or parameter.default == ():
        return "none"
    return f"`{parameter.default}`"
