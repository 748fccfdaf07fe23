"""Options that several commands of clients and operators share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

LOCAL = "127.0.0.1:8440"
UNENCRYPTED = "Allow an unencrypted connection to another machine."

Server = Annotated[
    str | None,
    typer.Option(
        envvar="FAIRFLEET_SERVER",
        metavar="HOST:PORT",
        help="Address of the server.",
        show_default=f"the address in the credentials, or {LOCAL}",
    ),
]
CredentialsFile = Annotated[
    Path | None,
    typer.Option(
        "--credentials",
        envvar="FAIRFLEET_CREDENTIALS",
        metavar="FILE",
        help="Credentials of an operator (operator.fleet), for a server with TLS.",
        show_default="none",
    ),
]
Insecure = Annotated[
    bool,
    typer.Option("--insecure", envvar="FAIRFLEET_INSECURE", help=UNENCRYPTED, show_default="off"),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.", show_default="off")]
TaskOptions = Annotated[
    list[str] | None,
    typer.Option(
        "--option",
        "-o",
        metavar="NAME=VALUE",
        help="Argument for the function that makes the task. May be repeated.",
        show_default="none",
    ),
]
TASK_HELP = "module:name of a Task, or of a function that makes one."
