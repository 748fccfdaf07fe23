"""`fairfleet status`, `fairfleet watch` and `fairfleet export`: what people ask a server."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

from fairfleet.client import display, screen
from fairfleet.client.exporting import save_model
from fairfleet.client.fleet_view import View, fold
from fairfleet.client.operator_link import OperatorLink
from fairfleet.common.access import Access
from fairfleet.common.errors import UsageError

Server = Annotated[
    str | None,
    typer.Option(
        envvar="FAIRFLEET_SERVER",
        metavar="HOST:PORT",
        help="Where the server listens; default: as the credentials say, or 127.0.0.1:8440.",
    ),
]
Credentials = Annotated[
    Path | None,
    typer.Option(envvar="FAIRFLEET_CREDENTIALS", metavar="FILE", help="operator.fleet, where the server has TLS."),
]
Insecure = Annotated[
    bool, typer.Option("--insecure", envvar="FAIRFLEET_INSECURE", help="Speak to another machine in the clear.")
]
Json = Annotated[bool, typer.Option("--json", help="For programs: JSON on standard output.")]
LOCAL = "127.0.0.1:8440"
LARGE_BYTES = 16 << 20  # from here on a download shows a bar


def linked(server: str | None, credentials: Path | None, insecure: bool) -> OperatorLink:
    return OperatorLink(Access(server or (None if credentials else LOCAL), credentials, insecure))


def status(
    server: Server = None, credentials: Credentials = None, insecure: Insecure = False, as_json: Json = False
) -> None:
    """How the federation stands, and how every client fares: worst served first.

    Examples:

      fairfleet status

      fairfleet status --server fleet.example:8440 --json
    """
    with linked(server, credentials, insecure) as link:
        snapshot = link.snapshot()
    if as_json:
        print(json.dumps(display.as_json(snapshot)))
    else:
        Console(highlight=False).print(screen.standing(fold(View(), snapshot)))


def watch(
    server: Server = None, credentials: Credentials = None, insecure: Insecure = False, as_json: Json = False
) -> None:
    """Watch rounds as they happen, until the federation is finished or you press Ctrl-C.

    On a terminal this is a live screen; elsewhere plain lines; with --json one object per event.
    A server that restarts is waited for.

    Examples:

      fairfleet watch

      fairfleet watch --json | jq 'select(.kind == "round_committed")'
    """
    with linked(server, credentials, insecure) as link:
        shown = display.json_lines() if as_json else display.for_people(Console(highlight=False))
        display.follow(link.observe(), shown)


def export(
    output: Annotated[Path, typer.Option("--output", help="The file to write.")],
    server: Server = None,
    credentials: Credentials = None,
    insecure: Insecure = False,
    version: Annotated[int | None, typer.Option(min=0, help="After so many rounds; default: the newest.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the file if it exists.")] = False,
    as_json: Json = False,
) -> None:
    """Fetch a committed model as a .safetensors file.

    Examples:

      fairfleet export --output model.safetensors

      fairfleet export --output before.safetensors --version 0
    """
    if output.exists() and not force:
        raise UsageError(f"{output} exists already; give another --output, or --force to replace it")
    with linked(server, credentials, insecure) as link, _download_bar() as progress:
        saved = save_model(link.model(version), output, progress)
    if as_json:
        print(json.dumps({"output": str(output), **saved._asdict()}))
    else:
        print(f"{output}: version {saved.version}, {decimal(saved.size_bytes)}")


@contextlib.contextmanager
def _download_bar() -> Iterator[Callable[[int, int], None]]:
    console = Console(stderr=True)
    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:

        def progress(done: int, size: int) -> None:
            if size >= LARGE_BYTES and not bar.task_ids:
                bar.add_task("model", total=size)
            for task in bar.task_ids:
                bar.update(task, completed=done)

        yield progress
