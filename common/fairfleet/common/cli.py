"""The program `fairfleet`: each part adds its commands through the entry-point group `fairfleet.commands`.

A command is a plain function with typer's annotations, or a typer app for a group of them. A part
whose extra is not installed adds nothing: a device simply has fewer commands.
"""

from __future__ import annotations

import sys
from importlib.metadata import entry_points, version

import typer
from rich.console import Console

from fairfleet.common.errors import FleetError

GROUP = "fairfleet.commands"
INTERRUPTED = 130


def program() -> typer.Typer:
    app = typer.Typer(
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        help="Federated learning that is fair: the clients served worst improve fastest.",
    )
    for entry in sorted(entry_points(group=GROUP), key=lambda entry: entry.name):
        try:
            command = entry.load()
        except ModuleNotFoundError as error:
            if (error.name or "").startswith("fairfleet"):
                raise
            continue  # this part's extra is not installed
        if isinstance(command, typer.Typer):
            app.add_typer(command, name=entry.name)
        else:
            app.command(entry.name)(command)
    app.callback()(_options)
    return app


def _options(
    show_version: bool = typer.Option(False, "--version", help="Print the version and exit.", is_eager=True),
) -> None:
    if show_version:
        print(f"fairfleet {version('fairfleet')}")
        raise typer.Exit


def main() -> None:
    try:
        program()()
    except FleetError as error:
        Console(stderr=True, highlight=False).print(f"[bold red]error:[/] {_plain(str(error))}", soft_wrap=True)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


def _plain(text: str) -> str:
    return text.replace("[", r"\[")  # a message is not markup


if __name__ == "__main__":
    main()
