"""`fairfleet server`: run a server, or check its state directory.

Options that are not given stay None, so that variables and the settings file can provide them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

from fairfleet.common.cli import log_format as logs
from fairfleet.common.cli.program import LogFormat, Verbose
from fairfleet.common.cli.settings import default_text, given_flags, read_settings
from fairfleet.common.errors import StateDirError, UsageError
from fairfleet.common.extras import require
from fairfleet.server import process
from fairfleet.server.app import serve
from fairfleet.server.cli import check_state
from fairfleet.server.settings import ServerSettings
from fairfleet.server.storage.database import FILE, MARK
from fairfleet.server.storage.store import Store


def _default(path: str) -> str:
    return default_text(ServerSettings, path)


ConfigFile = Annotated[
    Path | None,
    typer.Option("--config", "-c", help="YAML file with settings.", show_default="none"),
]
Listen = Annotated[
    str | None,
    typer.Option(
        metavar="HOST:PORT",
        help="Address to listen on; port 0 takes a free one.",
        show_default=_default("listen"),
    ),
]
StateDir = Annotated[
    Path | None,
    typer.Option(
        help="Directory for the server's persistent state.", show_default=_default("state_dir")
    ),
]
Pki = Annotated[
    Path | None,
    typer.Option(
        help="Folder made by `fairfleet pki init`: serve with TLS.", show_default="no TLS"
    ),
]
Enrolment = Annotated[
    str | None,
    typer.Option(
        metavar="HOST:PORT",
        help="Address for devices that enroll with a token. Needs the CA's key.",
        show_default="off",
    ),
]
Insecure = Annotated[
    bool | None,
    typer.Option("--insecure", help="Serve other machines without encryption.", show_default="off"),
]
InitialModel = Annotated[
    Path | None,
    typer.Option(
        help="Initial model, from `fairfleet init`.", show_default="the one in the state directory"
    ),
]
Rounds = Annotated[
    int | None, typer.Option(help="Number of rounds to train.", show_default=_default("rounds"))
]
MinimumClients = Annotated[
    int | None,
    typer.Option(
        help="Minimum number of connected clients to start a round.",
        show_default=_default("round.minimum_clients"),
    ),
]
ClientsPerRound = Annotated[
    int | None,
    typer.Option(
        help="Number of clients selected per round; 0 selects all.",
        show_default=_default("round.clients"),
    ),
]
RuleName = Annotated[
    str | None,
    typer.Option(
        help="Aggregation rule; see `fairfleet rules`.", show_default=_default("rule.name")
    ),
]
Codec = Annotated[
    str | None,
    typer.Option(
        help="Compression of updates: raw32, fp16, bf16, int8, int4, sign, topk:0.1, topsign:0.1, "
        "each also with +zstd; or auto.",
        show_default=_default("codec"),
    ),
]
Durability = Annotated[
    str | None,
    typer.Option(
        help="What survives a crash: received updates (update) or committed rounds (round).",
        show_default=_default("durability"),
    ),
]
Database = Annotated[
    str | None,
    typer.Option(
        metavar="URL",
        help="Database, for example postgresql+psycopg://….",
        show_default="SQLite in the state directory",
    ),
]
ExitWhenFinished = Annotated[
    bool | None,
    typer.Option("--exit-when-finished", help="Exit when all rounds are done.", show_default="off"),
]
# An option of its own: 80 columns have no room for the two names next to each other.
KeepServing = Annotated[
    bool,
    typer.Option(
        "--no-exit-when-finished",
        help="Keep serving when all rounds are done, whatever the settings file says.",
        show_default="off",
    ),
]
EvaluateTask = Annotated[
    str | None,
    typer.Option(
        metavar="MODULE:NAME",
        help="Task with test data of the server's own, on which versions are evaluated.",
        show_default="none",
    ),
]
EvaluateOptions = Annotated[
    list[str] | None,
    typer.Option(
        "--evaluate-option",
        metavar="NAME=VALUE",
        help="Option of that task. May be repeated.",
        show_default="none",
    ),
]
Assignments = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="PATH=VALUE",
        help="Any other setting. May be repeated.",
        show_default="none",
    ),
]
TensorBoard = Annotated[
    Path | None,
    typer.Option(help="Folder for TensorBoard event files.", show_default="off"),
]
Check = Annotated[
    bool,
    typer.Option(
        "--check",
        help="Only check the state directory, and change nothing.",
        show_default="off",
    ),
]


def server(
    config: ConfigFile = None,
    listen: Listen = None,
    state_dir: StateDir = None,
    pki: Pki = None,
    enrolment: Enrolment = None,
    insecure: Insecure = None,
    model: InitialModel = None,
    rounds: Rounds = None,
    minimum_clients: MinimumClients = None,
    clients: ClientsPerRound = None,
    rule: RuleName = None,
    codec: Codec = None,
    durability: Durability = None,
    database: Database = None,
    exit_when_finished: ExitWhenFinished = None,
    keep_serving: KeepServing = False,
    evaluate_task: EvaluateTask = None,
    evaluate_option: EvaluateOptions = None,
    set_: Assignments = None,
    tensorboard: TensorBoard = None,
    check: Check = False,
    log_format: LogFormat = "text",
    verbose: Verbose = False,
) -> None:
    """Run the server of one federation.

    Settings come from flags, then FAIRFLEET_* variables, then the YAML file, then defaults.

    Examples:

      fairfleet init --task my_task:task --output model.safetensors

      fairfleet server --model model.safetensors --rounds 50

      fairfleet server --model model.safetensors --rule fedfv --set rule.alpha=0.2

      fairfleet server -c federation.yaml --set plan.learning_rate=0.05

      fairfleet server --pki fairfleet-pki --listen 0.0.0.0:8440

      fairfleet server --check --state-dir backup/fairfleet-state
    """
    logs.set_up(verbose, log_format, "fairfleet-server")
    flags = {
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
        "exit_when_finished": False if keep_serving else exit_when_finished,
        "tensorboard": tensorboard,
        "evaluation.task": evaluate_task,
        **_task_options(evaluate_option),
    }
    settings = read_settings(ServerSettings, config, given_flags(flags, set_))
    if check:
        _check(settings)
        return
    _require_libraries(settings)
    process.keep_compact()
    process.allow_many_connections()
    asyncio.run(serve(settings, _announce))


def _require_libraries(settings: ServerSettings) -> None:
    """Raise UsageError for a missing library before the state directory is made."""
    if settings.privacy:
        require("the section privacy", "dp_accounting")
    if settings.tensorboard:
        require("the option --tensorboard", "tensorboardX")


def _task_options(texts: Iterable[str] | None) -> dict[str, str]:
    """Return the options of the server's own task, by setting."""
    options = dict[str, str]()
    for text in texts or ():
        name, equals, value = text.partition("=")
        if not equals:
            raise UsageError(f"--evaluate-option {text!r} is not of the form name=value")
        options[f"evaluation.options.{name}"] = value
    return options


def _check(settings: ServerSettings) -> None:
    folder, database = settings.state_dir, settings.database
    mark = MARK if database else FILE
    if not (folder / mark).exists():
        raise StateDirError(f"{folder} holds no federation: it contains no {mark}")
    store = Store(folder, database, schema=settings.database_schema, migrate=False)
    try:
        with store.explained():
            if not store.has_federation:
                raise StateDirError(f"{folder} holds no federation: it was never given a model")
            result = check_state.check(store)
    finally:
        store.close()
    if result.problems:
        raise StateDirError(
            f"{folder} is damaged:\n" + "\n".join(f"  {problem}" for problem in result.problems)
        )
    print(f"{folder} is intact: version {result.versions}, {result.files} files read and compared")


def _announce(address: str, url: str) -> None:
    """Print the addresses on standard output, where programs that start a server read them."""
    print(f"serving on {address}\nwatch it on {url}/, metrics on {url}/metrics", flush=True)
