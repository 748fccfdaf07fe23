"""`fairfleet client` and `fairfleet init`: the commands of a device.

Options that are not given stay None, so that variables and the settings file can provide them.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import signal
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from fairfleet.client.agent.agent import Agent
from fairfleet.client.cli.options import TASK_HELP, UNENCRYPTED, TaskOptions
from fairfleet.client.device.availability import Availability
from fairfleet.client.device.conditions import condition
from fairfleet.client.device.priority import give_way
from fairfleet.client.device.replica import number_of
from fairfleet.client.settings import ClientSettings
from fairfleet.client.task import Task, load_task
from fairfleet.common.atomic_files import Sync, write_atomically
from fairfleet.common.cli import log_format as logs
from fairfleet.common.cli.program import LogFormat, Verbose
from fairfleet.common.cli.settings import default_text, given_flags, read_settings
from fairfleet.common.errors import UsageError
from fairfleet.common.extras import require
from fairfleet.common.net.server_access import ServerAccess
from fairfleet.common.tensors import Model, Section

log = logging.getLogger(__name__)


def _default(path: str) -> str:
    return default_text(ClientSettings, path)


TaskName = Annotated[
    str | None,
    typer.Option(help=f"{TASK_HELP} Required, here or in the settings.", show_default="none"),
]
ServerAddress = Annotated[
    str | None,
    typer.Option(
        metavar="HOST:PORT",
        help="Address of the server.",
        show_default=f"the address in the credentials, or {_default('server')}",
    ),
]
ClientName = Annotated[
    str | None,
    typer.Option(
        help="Name of this client.", show_default="the name in the credentials, or the host name"
    ),
]
CredentialsFile = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="NAME.fleet from `fairfleet enroll`: the server's address and this identity.",
        show_default="none",
    ),
]
Insecure = Annotated[bool | None, typer.Option("--insecure", help=UNENCRYPTED, show_default="off")]
StateDir = Annotated[
    Path | None,
    typer.Option(
        help="Directory for updates that are not sent yet.",
        show_default="~/.local/state/fairfleet",
    ),
]
Device = Annotated[
    str | None,
    typer.Option(help="auto, cpu, cuda, cuda:1 or mps.", show_default=_default("device")),
]
MaxSteps = Annotated[
    int | None,
    typer.Option(help="Maximum solver steps per training.", show_default="the server's plan"),
]
MaxSeconds = Annotated[
    float | None,
    typer.Option(
        help="Start no training step after this time. One step is always done.",
        show_default="no limit",
    ),
]
MaxMemory = Annotated[
    int | None,
    typer.Option(
        help="Memory for one training step, in MB. Batches get smaller to fit.",
        show_default="no limit",
    ),
]
When = Annotated[
    list[str] | None,
    typer.Option(
        help="Train only while these conditions hold: idle, mains, unmetered, run=COMMAND, "
        "module:name. May be repeated.",
        show_default="always",
    ),
]
Niceness = Annotated[
    int | None,
    typer.Option(
        help="How far this process gives way to others: 0 (not at all) to 19.",
        show_default=_default("niceness"),
    ),
]
Metrics = Annotated[
    str | None,
    typer.Option(
        metavar="HOST:PORT", help="Serve this client's Prometheus metrics.", show_default="off"
    ),
]
LeastNoise = Annotated[
    float | None,
    typer.Option(
        help="Send no update with a smaller noise multiplier; see docs/explanation/privacy.md.",
        show_default=_default("least_noise"),
    ),
]
MaxEpsilon = Annotated[
    float | None,
    typer.Option(
        help="Retire before a release of this client's data would exceed this epsilon; see "
        "docs/explanation/privacy.md.",
        show_default="no limit",
    ),
]
Delta = Annotated[
    float | None,
    typer.Option(help="Delta of --max-epsilon.", show_default=_default("delta")),
]
SendErrorText = Annotated[
    bool | None,
    typer.Option(
        "--send-error-text",
        help="Report the full text of a task's errors to the server. It may quote data.",
        show_default="off",
    ),
]
SaveModel = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Save the model to this .safetensors file at each evaluation and at the end.",
        show_default="none",
    ),
]
NoErrorFeedback = Annotated[
    bool | None,
    typer.Option(
        "--no-error-feedback",
        help="Keep nothing on disk of what updates lost to their codec. Saves writes.",
        show_default="as the server wants",
    ),
]
ConfigFile = Annotated[
    Path | None,
    typer.Option("--config", "-c", help="YAML file with settings.", show_default="none"),
]


def client(
    task: TaskName = None,
    server: ServerAddress = None,
    name: ClientName = None,
    credentials: CredentialsFile = None,
    insecure: Insecure = None,
    option: TaskOptions = None,
    state_dir: StateDir = None,
    device: Device = None,
    max_steps: MaxSteps = None,
    max_seconds: MaxSeconds = None,
    max_memory_mb: MaxMemory = None,
    when: When = None,
    niceness: Niceness = None,
    metrics: Metrics = None,
    least_noise: LeastNoise = None,
    max_epsilon: MaxEpsilon = None,
    delta: Delta = None,
    send_error_text: SendErrorText = None,
    save_model: SaveModel = None,
    no_error_feedback: NoErrorFeedback = None,
    config: ConfigFile = None,
    log_format: LogFormat = "text",
    verbose: Verbose = False,
) -> None:
    """Train in a federation with the data of this machine.

    The data never leaves the machine. If the task fails, the server receives only the type of the
    error; the full text is in this client's log (see --send-error-text). Settings come from flags,
    then FAIRFLEET_* variables, then the YAML file, then defaults.

    Examples:

      fairfleet client --credentials kitchen.fleet --task my_task:task

      fairfleet client --task my_task:task -o shard=3 --name client-3

      fairfleet client --task my_task:task --max-seconds 60 --max-memory-mb 500

      fairfleet client --task my_task:task --when mains --when idle

      fairfleet client --task my_task:task --save-model model.safetensors
    """
    logs.set_up(verbose, log_format, "fairfleet-client")
    flags = {
        "task": task,
        "server": server,
        "name": name,
        "credentials": credentials,
        "insecure": insecure,
        "options": _task_options(option) or None,
        "state_dir": state_dir,
        "device": device,
        "budget.steps": max_steps,
        "budget.seconds": max_seconds,
        "budget.memory_mb": max_memory_mb,
        "when": when or None,
        "niceness": niceness,
        "metrics": metrics,
        "least_noise": least_noise,
        "max_epsilon": max_epsilon,
        "delta": delta,
        "send_error_text": send_error_text,
        "save_model": save_model,
        "error_feedback": False if no_error_feedback else None,
    }
    _run(config, given_flags(flags))


def init(
    task: Annotated[
        str | None, typer.Option(help=f"{TASK_HELP} Required.", show_default="none")
    ] = None,
    output: Annotated[Path, typer.Option("--output", help="The file to write.")] = Path(
        "model.safetensors"
    ),
    option: TaskOptions = None,
    keep: Annotated[
        bool, typer.Option("--keep", help="Keep a file that exists already.", show_default="off")
    ] = False,
) -> None:
    """Write a task's untrained model to a .safetensors file.

    The server starts from it: `fairfleet server --model FILE`.

    Example:

      fairfleet init --task my_task:task --output model.safetensors
    """
    if task is None:
        raise UsageError(
            "--task is missing: a module:name, for example `fairfleet init --task my_task:task`. "
            "`fairfleet new NAME` writes such a task."
        )
    if output.exists() and keep:
        print(f"{output}: kept")
        return
    if output.exists():
        raise UsageError(
            f"{output} exists already; remove it, give another --output, or keep it with --keep"
        )
    model = load_task(task, _task_options(option)).initial_model()
    _save(model, output)
    parameters = model.signature.size(Section.PARAMETERS)
    print(f"{output}: {len(model.signature.tensors)} tensors, {parameters:,} parameters")


def _run(config: Path | None, flags: dict[str, Any]) -> None:
    with _numbered(read_settings(ClientSettings, config, flags)) as (numbered, replica):
        settings, access = numbered.identified()
        if settings.metrics:
            require("the option --metrics", "prometheus_client", extras="metrics")
        logs.add_attributes(client=settings.name)
        if replica is not None:
            log.info("this is replica %d: %s", replica, settings.name)
        give_way(settings.niceness)  # before the task is made, because a task may start threads
        agent = _agent(settings, access)
        if settings.metrics:
            log.info("metrics on %s", _serve_metrics(agent, settings.name, settings.metrics))
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: agent.stop())
        # The task and the libraries stay until the end, so the garbage collector need not look at
        # them again in every round.
        gc.collect()
        gc.freeze()
        print(f"{settings.name}: {agent.run()}")


@contextlib.contextmanager
def _numbered(settings: ClientSettings) -> Iterator[tuple[ClientSettings, int | None]]:
    """Put this replica's number into the settings, if it is one of several.

    A number that was claimed belongs to this process until the end of the context.
    """
    if settings.replica is None:
        yield settings, None
        return
    with number_of(settings.replica, settings.state_dir) as number:
        yield settings.numbered(number), number


def _agent(settings: ClientSettings, access: ServerAccess) -> Agent:
    return Agent(
        settings.name,
        _task(settings),
        access,
        settings.state_dir / settings.name,
        settings.budget,
        settings.least_noise,
        Availability([condition(text) for text in settings.when], settings.when_seconds),
        settings.send_error_text,
        settings.save_model,
        error_feedback=settings.error_feedback,
        max_epsilon=settings.max_epsilon,
        delta=settings.delta,
        refresh_seconds=settings.refresh_seconds,
    )


def _task(settings: ClientSettings) -> Task:
    task = load_task(settings.task, settings.options)
    if use_device := getattr(task, "use_device", None):
        use_device(settings.device)
    return task


def _serve_metrics(agent: Agent, name: str, listen: str) -> str:
    from fairfleet.client.agent.prometheus import serve

    return serve(agent.counters, name, listen)


def _save(model: Model, output: Path) -> None:
    # The file gets its name when it is complete: a later call with --keep relies on it.
    try:
        write_atomically(output, model.save, sync=Sync.FILE)
    except OSError as error:
        raise UsageError(
            f"cannot write {output}: {error.strerror}. Give another --output."
        ) from error


def _task_options(texts: Iterable[str] | None) -> dict[str, str]:
    return dict(_task_option(text) for text in texts or ())


def _task_option(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise UsageError(f"--option {text!r} is not of the form name=value, for example shard=3")
    return name, value
