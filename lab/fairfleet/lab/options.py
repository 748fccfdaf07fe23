"""Flags that `simulate`, `compare` and `reproduce` have in common, and the experiment that flags and YAML describe."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from fairfleet.common.settings import pair
from fairfleet.lab.datasets.places import VARIABLE

WIDTH = 120
DataDir = Annotated[Path | None, typer.Option(help=f"Where the datasets are, before the folders of {VARIABLE}.")]
Workers = Annotated[int, typer.Option(min=0, help="Threads that train; 0 takes all cores.")]
AsJson = Annotated[bool, typer.Option("--json", help="For programs: one JSON object on standard output.")]
Data = Annotated[str | None, typer.Option(help="A dataset: digits-rotated, fashion-mnist, synthetic,alpha=0.5, …")]
How = Annotated[str | None, typer.Option("--partition", help="iid, shards:2, dirichlet:0.1, user, …")]
Clients = Annotated[int | None, typer.Option(min=1, help="How many clients there are.")]
PerRound = Annotated[int | None, typer.Option(min=0, help="Clients asked in a round; 0 asks all.")]
ModelName = Annotated[str | None, typer.Option("--model", help="softmax, mlp:200,200, cnn-mcmahan, …")]
Rounds = Annotated[int | None, typer.Option(min=1, help="How many rounds to train.")]
Settings = Annotated[list[str] | None, typer.Option("--set", help="Any other field of an experiment, as path=value.")]


def experiment_flags(
    data: str | None,
    partition: str | None,
    clients: int | None,
    per_round: int | None,
    model: str | None,
    rounds: int | None,
    settings: list[str] | None,
) -> dict[str, Any]:
    """What was given, by the path of its field."""
    flags = {
        "data": data,
        "partition": partition,
        "clients": clients,
        "clients_per_round": per_round,
        "model": model,
        "rounds": rounds,
    }
    given: dict[str, Any] = {path: value for path, value in flags.items() if value is not None}
    return given | dict(pair(text) for text in settings or ())


def end_on_signals() -> None:
    """As Ctrl-C does: what was done is kept."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # under nohup a hangup stays without effect
            signal.signal(number, lambda number, _: sys.exit(128 + number))


def console(as_json: bool = False) -> Console:
    """Where people read. A file or a pipe has no width of its own, and tables need some."""
    made = Console(stderr=as_json, highlight=False)
    return (
        made if made.is_terminal or "COLUMNS" in os.environ else Console(stderr=as_json, highlight=False, width=WIDTH)
    )
