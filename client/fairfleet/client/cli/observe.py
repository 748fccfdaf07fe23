"""`fairfleet status`, `watch`, `models` and `export`: what operators read from a server."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.filesize import decimal
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from fairfleet.client.cli.options import LOCAL, CredentialsFile, Insecure, Json, Server
from fairfleet.client.operator import display, live_screen
from fairfleet.client.operator.connection import OperatorConnection
from fairfleet.client.operator.fleet_view import FleetView, fold
from fairfleet.client.operator.model_download import save_model
from fairfleet.client.operator.model_table import print_models
from fairfleet.common.cli.message_json import plain
from fairfleet.common.errors import UsageError
from fairfleet.common.net.server_access import ServerAccess

HOW_TO_LOAD = """\
PyTorch: from safetensors.torch import load_file; model.load_state_dict(load_file({output!r}))
numpy:   from safetensors.numpy import load_file; tensors = load_file({output!r})"""
LARGE_BYTES = 16 << 20  # the download of a model of this size shows a progress bar


def connect(server: str | None, credentials: Path | None, insecure: bool) -> OperatorConnection:
    """Return a connection to the server that the options name."""
    return OperatorConnection(
        ServerAccess(server or (None if credentials else LOCAL), credentials, insecure)
    )


def status(
    server: Server = None,
    credentials: CredentialsFile = None,
    insecure: Insecure = False,
    as_json: Json = False,
) -> None:
    """Show federation status and per-client figures, worst first.

    Examples:

      fairfleet status

      fairfleet status --server fleet.example:8440 --json
    """
    with connect(server, credentials, insecure) as connection:
        snapshot = connection.snapshot()
    if as_json:
        print(json.dumps(display.as_json(snapshot)))
    else:
        Console(highlight=False).print(live_screen.standing(fold(FleetView(), snapshot)))


def watch(
    server: Server = None,
    credentials: CredentialsFile = None,
    insecure: Insecure = False,
    as_json: Json = False,
) -> None:
    """Show rounds as they happen, until the federation finishes.

    On a terminal it is a live screen, elsewhere plain lines, with --json one object per event. It
    waits for a server that restarts. Ctrl-C ends it.

    Examples:

      fairfleet watch

      fairfleet watch --json | jq 'select(.kind == "round_committed")'
    """
    with connect(server, credentials, insecure) as connection:
        screen = display.json_lines() if as_json else display.for_people(Console(highlight=False))
        display.follow(connection.observe(), screen)


def models(
    server: Server = None,
    credentials: CredentialsFile = None,
    insecure: Insecure = False,
    as_json: Json = False,
) -> None:
    """List the versions that are kept, with their scores.

    Kept are the newest ones, the initial one and the best evaluated one. A measure has its mean
    over the clients that evaluated the version, and that of the worst-served tenth of them.

    Examples:

      fairfleet models

      fairfleet models --json | jq '[.version, .kept_because]'
    """
    with connect(server, credentials, insecure) as connection:
        records = connection.models()
    if as_json:
        for record in records:
            print(json.dumps(plain(record)))
    else:
        print_models(records, Console(highlight=False))


def export(
    output: Annotated[Path, typer.Option("--output", help="The file to write.")],
    server: Server = None,
    credentials: CredentialsFile = None,
    insecure: Insecure = False,
    version: Annotated[
        int | None,
        typer.Option(min=0, help="The model after this many rounds.", show_default="the newest"),
    ] = None,
    best: Annotated[
        bool,
        typer.Option("--best", help="The best evaluated version.", show_default="off"),
    ] = False,
    force: Annotated[
        bool,
        typer.Option("--force", help="Replace the file if it exists.", show_default="off"),
    ] = False,
    as_json: Json = False,
) -> None:
    """Download a committed model as a .safetensors file.

    `fairfleet models` lists the versions that are kept.

    Examples:

      fairfleet export --output model.safetensors

      fairfleet export --output best.safetensors --best

      fairfleet export --output before.safetensors --version 0
    """
    if os.path.exists(output) and not force:  # unlike Path.exists, False for an impossible name
        raise UsageError(
            f"{output} exists already; give another --output, or --force to replace it"
        )
    if best and version is not None:
        raise UsageError("--best and --version exclude each other; give one of them")
    with connect(server, credentials, insecure) as connection, _download_bar() as progress:
        if best:
            _check_has_best(connection)
        saved = save_model(connection.model(version, best), output, progress)
    if as_json:
        print(json.dumps({"output": str(output), **saved._asdict()}))
    else:
        print(f"{output}: version {saved.version}, {decimal(saved.size_bytes)}")
        print(HOW_TO_LOAD.format(output=str(output)))


def _check_has_best(connection: OperatorConnection) -> None:
    """Raise UsageError for a server that does not know `best`: it would send the newest version."""
    status = connection.status()
    if not status.software and not status.HasField("best_version"):
        raise UsageError(
            f"the server at {connection.address} is older than --best; give a --version"
        )


@contextlib.contextmanager
def _download_bar() -> Iterator[Callable[[int, int], None]]:
    console = Console(stderr=True)
    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:

        def _progress(done: int, size: int) -> None:
            if size >= LARGE_BYTES and not bar.task_ids:
                bar.add_task("model", total=size)
            for task in bar.task_ids:
                bar.update(task, completed=done)

        yield _progress
