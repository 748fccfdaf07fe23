"""Flags that `simulate`, `compare` and `reproduce` share, and what the commands have in common."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from fairfleet.common.cli.settings import parse_assignment
from fairfleet.lab.datasets.places import VARIABLE

WIDTH = 120  # of tables in a file or a pipe, which have no width of their own

# The defaults of these flags are those of an experiment. None leaves a field to the YAML file.
DataDir = Annotated[
    Path | None,
    typer.Option(
        help=f"Folder of the datasets, searched before the folders of {VARIABLE}.",
        show_default="none",
    ),
]
Workers = Annotated[int, typer.Option(min=0, help="Training threads; 0 uses all cores.")]
AsJson = Annotated[
    bool,
    typer.Option(
        "--json",
        help="Print one JSON object on standard output, for programs.",
        show_default="off",
    ),
]
Data = Annotated[
    str | None,
    typer.Option(
        help="Dataset: digits-rotated, fashion-mnist, synthetic,alpha=0.5, …",
        show_default="digits-rotated",
    ),
]
PartitionSpec = Annotated[
    str | None,
    typer.Option(
        "--partition", help="Partition: iid, shards:2, dirichlet:0.1, user, …", show_default="user"
    ),
]
Clients = Annotated[
    int | None, typer.Option(min=1, help="Number of clients.", show_default="from the data")
]
PerRound = Annotated[
    int | None,
    typer.Option(min=0, help="Clients selected per round; 0 selects all.", show_default="0"),
]
ModelName = Annotated[
    str | None,
    typer.Option(
        "--model", help="Model: softmax, mlp:200,200, cnn-mcmahan, …", show_default="softmax+zero"
    ),
]
Rounds = Annotated[int | None, typer.Option(min=1, help="Number of rounds.", show_default="100")]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="PATH=VALUE",
        help="Any other field of an experiment. May be repeated.",
        show_default="none",
    ),
]


def experiment_flags(
    data: str | None,
    partition: str | None,
    clients: int | None,
    per_round: int | None,
    model: str | None,
    rounds: int | None,
    settings: list[str] | None,
) -> dict[str, Any]:
    """Return the values of the given flags by the path of their field; `--set` wins."""
    flags = {
        "data": data,
        "partition": partition,
        "clients": clients,
        "clients_per_round": per_round,
        "model": model,
        "rounds": rounds,
    }
    given: dict[str, Any] = {path: value for path, value in flags.items() if value is not None}
    return given | dict(parse_assignment(text) for text in settings or ())


def end_on_signals() -> None:
    """Let SIGTERM and SIGHUP end the process like Ctrl-C, so that finished work is kept.

    An ignored signal stays ignored, for example a hangup under nohup.
    """
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, lambda number, _: sys.exit(128 + number))


def console(as_json: bool = False) -> Console:
    """Return the console for people: standard error if standard output carries JSON."""
    terminal = Console(stderr=as_json, highlight=False)
    if terminal.is_terminal or "COLUMNS" in os.environ:
        return terminal
    return Console(stderr=as_json, highlight=False, width=WIDTH)
