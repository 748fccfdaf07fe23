"""The commands of `fairfleet`: each part registers its own in the group `fairfleet.commands`.

A command is a plain function with typer's annotations, or a typer app for a group of them. Only the
command that is called is imported. A command whose extra is not installed is not listed, and says
which extra to install when it is called.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points
from importlib.metadata import version as installed_version
from importlib.util import find_spec
from io import TextIOWrapper
from typing import Annotated, Any, NoReturn

import typer

from fairfleet.common.cli.command_list import GROUPS
from fairfleet.common.cli.log_format import Format
from fairfleet.common.errors import FleetError, UsageError
from fairfleet.common.extras import install_command, missing, optional_module

GROUP = "fairfleet.commands"
INTERRUPTED = 130
COMPLETION = "_FAIRFLEET_COMPLETE"  # set by a shell that asks for completions
ABOUT = """Federated learning that is fair: the clients served worst improve fastest.

To begin, run `fairfleet demo`. `fairfleet COMMAND --help` has examples.
"""
NO_HELP = "(no description)"

LogFormat = Annotated[
    Format,
    typer.Option(
        envvar="FAIRFLEET_LOG_FORMAT",
        help="Log as text for people, or as JSON: one OpenTelemetry log record per line.",
    ),
]
Verbose = Annotated[
    bool, typer.Option("--verbose", "-v", help="Log debug messages as well.", show_default="off")
]


def program(command: str | None = None) -> typer.Typer:
    """Return the program with one command, or with every installed one if none is named.

    With a name, only that command is imported: a client does not load the server's libraries.
    Raises UsageError if the extra of the named command is not installed.
    """
    app = _new_app()
    entries = _entries()
    if command in entries:
        if failure := _load(app, entries[command]):
            raise _needs_extra(entries[command], failure)
    else:
        for _, entry in sorted(entries.items()):
            _load(app, entry)
    return app


def overview() -> typer.Typer:
    """Return the program as `fairfleet --help` lists it, in groups; no listed command can run.

    Commands of the list are not imported. Those of other packages follow, and are.
    """
    app = _new_app()
    entries = _entries()
    for panel, summaries in GROUPS.items():
        for summary in summaries:
            is_installed = summary.needs is None or find_spec(summary.needs) is not None
            if entries.pop(summary.name, None) and is_installed:
                app.command(summary.name, help=summary.text, rich_help_panel=panel)(_not_loaded)
    for _, entry in sorted(entries.items()):
        _load(app, entry)
    return app


def unwrapped(docstring: str | None) -> str:
    """Return a docstring as help text: paragraphs flow, indented examples keep their lines.

    Typer fits the result to the terminal. The backspace character marks a paragraph whose line
    breaks it must keep. A second one ends the paragraph: without an unindented last line, typer
    would remove the indentation.
    """
    paragraphs: list[str] = []
    for paragraph in inspect.cleandoc(docstring or NO_HELP).split("\n\n"):
        if paragraph.startswith("  ") and paragraphs:
            lines = paragraphs[-1].strip("\b\n") + "\n" + paragraph
            paragraphs[-1] = f"\b{lines}\n\b"
        else:
            paragraphs.append(" ".join(paragraph.split("\n")))
    return "\n\n".join(paragraphs)


def run() -> None:
    """Run the command that the command line names; errors become messages and exit codes."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            # A character that an old terminal cannot show must not end the program.
            stream.reconfigure(errors="replace")
    try:
        _chosen()()
    except FleetError as error:
        _fail(error)
    except ModuleNotFoundError as error:
        if (module := optional_module(error)) is None:
            raise
        _fail(missing(f"`fairfleet {sys.argv[1]}`", module))
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


def _fail(error: FleetError) -> NoReturn:
    from rich.console import Console  # imported late, because it takes a while

    Console(stderr=True, highlight=False, emoji=False).print(
        f"[bold red]error:[/] {_escaped(str(error))}", soft_wrap=True
    )
    sys.exit(error.exit_code)


def _chosen() -> typer.Typer:
    """Return as much of the program as this call needs.

    Every option before the command prints something and exits, so it needs no command.
    """
    if COMPLETION in os.environ:
        return program()
    command = next(iter(sys.argv[1:]), None)
    return program(command) if command in _entries() else overview()


def _entries() -> dict[str, EntryPoint]:
    return {entry.name: entry for entry in entry_points(group=GROUP)}


def _new_app() -> typer.Typer:
    app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, help=unwrapped(ABOUT))
    app.callback()(_options)
    return app


def _load(app: typer.Typer, entry: EntryPoint) -> ModuleNotFoundError | None:
    """Import a command and add it, or return the error if a library is not installed."""
    try:
        command = entry.load()
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("fairfleet"):
            raise  # our own module is missing, which no extra provides
        return error
    _add(app, entry.name, command)
    return None


def _add(app: typer.Typer, name: str, command: Callable[..., Any] | typer.Typer) -> None:
    if not isinstance(command, typer.Typer):
        app.command(name, help=unwrapped(command.__doc__))(command)
        return
    for info in (*command.registered_commands, command.registered_callback):
        if info is not None and info.callback:
            info.help = unwrapped(info.callback.__doc__)
    app.add_typer(command, name=name)


def _not_loaded() -> None:
    """Stand in for a command in the overview, which only prints help."""


def _needs_extra(entry: EntryPoint, error: ModuleNotFoundError) -> UsageError:
    what, extra = f"`fairfleet {entry.name}`", entry.value.split(".")[1]
    if module := optional_module(error):
        # The lab's extra includes the server's.
        return missing(what, module, extras=extra if extra == "lab" else "")
    return UsageError(
        f"{what} needs {error.name}, which is not installed. Run {install_command(extra)}"
    )


def _print_version(requested: bool) -> None:
    if requested:
        print(f"fairfleet {installed_version('fairfleet')}")
        raise typer.Exit


def _options(
    version: bool = typer.Option(
        False,
        "--version",
        help="Print the version and exit.",
        is_eager=True,
        callback=_print_version,
    ),
) -> None:
    """Declare the options of the program itself, which act as soon as they are read."""


def _escaped(text: str) -> str:
    """Return a text that rich prints as it is, without reading markup in it."""
    return text.replace("[", r"\[")
