"""`fairfleet server`."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated, Any

import typer

from fairfleet.common import logs
from fairfleet.common.errors import StateDirError, UsageError
from fairfleet.common.program import LogFormat
from fairfleet.common.settings import read_settings
from fairfleet.server import checking, process
from fairfleet.server.database import FILE, MARK
from fairfleet.server.serve import serve
from fairfleet.server.settings import ServerSettings
from fairfleet.server.store import Store


def server(
    config: Annotated[Path | None, typer.Option("--config", "-c", help="YAML file with settings.")] = None,
    listen: Annotated[str | None, typer.Option(help="host:port to listen on; port 0 takes a free one.")] = None,
    state_dir: Annotated[Path | None, typer.Option(help="Where the federation lives.")] = None,
    pki: Annotated[Path | None, typer.Option(help="Folder of `fairfleet pki init`: serve with TLS.")] = None,
    enrolment: Annotated[str | None, typer.Option(help="host:port for devices with a token; needs the CA key.")] = None,
    insecure: Annotated[
        bool | None, typer.Option("--insecure", help="Listen beyond this machine in the clear.")
    ] = None,
    model: Annotated[Path | None, typer.Option(help="Initial model, from `fairfleet init`.")] = None,
    rounds: Annotated[int | None, typer.Option(help="How many rounds to train.")] = None,
    minimum_clients: Annotated[int | None, typer.Option(help="A round begins when so many are connected.")] = None,
    clients: Annotated[int | None, typer.Option(help="Asked per round; 0 asks all.")] = None,
    rule: Annotated[str | None, typer.Option(help="The aggregation rule; see `fairfleet rules`.")] = None,
    codec: Annotated[
        str | None,
        typer.Option(
            help="For updates: int8 (default), raw32, fp16, bf16, int4, sign, topk:0.1, topsign:0.1, also +zstd; auto."
        ),
    ] = None,
    durability: Annotated[str | None, typer.Option(help="update (default) or round.")] = None,
    database: Annotated[str | None, typer.Option(help="postgresql+psycopg://…; default: in the state dir.")] = None,
    exit_when_finished: Annotated[bool | None, typer.Option(help="End when all rounds are done.")] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help="Any other setting, as path=value.")] = None,
    tensorboard: Annotated[Path | None, typer.Option(help="Write TensorBoard event files to this folder.")] = None,
    check: Annotated[bool, typer.Option("--check", help="Only verify the state directory; change nothing.")] = False,
    log_format: LogFormat = "text",
    verbose: Annotated[bool, typer.Option("--verbose", "-v")] = False,
) -> None:
    """Run the aggregation server of one federation.

    Settings come from flags, then FAIRFLEET_* variables, then the YAML file, then defaults.

    Examples:

      fairfleet init --task my_task:task --output model.safetensors

      fairfleet server --model model.safetensors --rounds 50 --minimum-clients 4

      fairfleet server --model model.safetensors --rule fedfv --set rule.alpha=0.2

      fairfleet server -c federation.yaml --set plan.learning_rate=0.05

      fairfleet server --model model.safetensors --pki fairfleet-pki --listen 0.0.0.0:8440

      fairfleet server --check --state-dir backup/fairfleet-state
    """
    logs.set_up(verbose, log_format, "fairfleet-server")
    flags: dict[str, Any] = {
        "listen": listen,
        "state_dir": state_dir,
        "pki": pki,
        "enrolment": enrolment,
        "insecure": insecure,
        "model": model,
        "rounds": rounds,
        "round.minimum_clients": minimum_clients,
        "round.clients": clients,
        "rule.name": rule,
        "codec": codec,
        "durability": durability,
        "database": database,
        "exit_when_finished": exit_when_finished,
        "tensorboard": tensorboard,
    }
    given = {path: value for path, value in flags.items() if value is not None}
    settings = read_settings(ServerSettings, config, given | dict(_pair(text) for text in set_ or ()))
    if check:
        _check(settings.state_dir, settings.database)
        return
    process.keep_compact()
    process.allow_many_connections()
    asyncio.run(serve(settings, _announce))


def _check(folder: Path, database: str | None) -> None:
    if not (folder / (MARK if database else FILE)).exists():
        raise StateDirError(f"{folder} holds no federation: there is no {MARK if database else FILE} in it")
    store = Store(folder, database, migrate=False)
    try:
        with store.explained():
            if not store.has_federation:
                raise StateDirError(f"{folder} holds no federation: it was never given a model")
            found = checking.check(store)
    finally:
        store.close()
    if found.problems:
        raise StateDirError(f"{folder} is not whole:\n" + "\n".join(f"  {problem}" for problem in found.problems))
    print(f"{folder} is whole: version {found.versions}, {found.files} files read and compared")


def _announce(address: str, url: str) -> None:
    """On standard output: programs that start a server read it."""
    print(f"serving on {address}\nwatch it on {url}/, metrics on {url}/metrics", flush=True)


def _pair(text: str) -> tuple[str, str]:
    path, found, value = text.partition("=")
    if not found:
        raise UsageError(f"--set {text!r} is not of the form path=value, for example plan.learning_rate=0.05")
    return path, value
