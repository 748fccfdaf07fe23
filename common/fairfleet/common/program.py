"""The commands of `fairfleet`: each part adds its own through the entry-point group `fairfleet.commands`.

A command is a plain function with typer's annotations, or a typer app for a group of them. A part
whose extra is not installed adds nothing: a device simply has fewer commands.
"""

from __future__ import annotations

import sys
from importlib.metadata import EntryPoint, entry_points
from importlib.metadata import version as installed_version
from io import TextIOWrapper
from typing import Annotated

import typer

from fairfleet.common.errors import FleetError, UsageError
from fairfleet.common.logs import Format

GROUP = "fairfleet.commands"
INTERRUPTED = 130

LogFormat = Annotated[
    Format, typer.Option(envvar="FAIRFLEET_LOG_FORMAT", help="text, or json: one OpenTelemetry log record a line.")
]


def program(wanted: str | None = None) -> typer.Typer:
    """With the name of a command, only that one is imported: a client need not load the server's parts."""
    app = typer.Typer(
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        help="Federated learning that is fair: the clients served worst improve fastest.",
    )
    known = {entry.name: entry for entry in entry_points(group=GROUP)}
    for name in [wanted] if wanted in known else sorted(known):
        try:
            command = known[name].load()
        except ModuleNotFoundError as error:
            if (error.name or "").startswith("fairfleet"):
                raise
            if name == wanted:
                raise UsageError(_needs_extra(known[name], error.name)) from error
            continue  # this part's extra is not installed
        if isinstance(command, typer.Typer):
            app.add_typer(command, name=name)
        else:
            app.command(name)(command)
    app.callback()(_options)
    return app


def _needs_extra(entry: EntryPoint, missing: str | None) -> str:
    extra = entry.value.split(".")[1]
    return f"`fairfleet {entry.name}` needs {missing}, which is not installed: pip install 'fairfleet[{extra}]'"


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"fairfleet {installed_version('fairfleet')}")
        raise typer.Exit


def _options(
    version: bool = typer.Option(False, "--version", help="Print the version.", is_eager=True, callback=_print_version),
) -> None:
    """Of the program itself. Acted upon when they are read: without a command, nothing further is called."""


def run() -> None:
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")  # a bar that an old terminal cannot show is no reason to fail
    try:
        program(next((word for word in sys.argv[1:] if not word.startswith("-")), None))()
    except FleetError as error:
        from rich.console import Console  # only to complain: it takes a while to import

        Console(stderr=True, highlight=False).print(f"[bold red]error:[/] {_plain(str(error))}", soft_wrap=True)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


def _plain(text: str) -> str:
    return text.replace("[", r"\[")  # a message is not markup
