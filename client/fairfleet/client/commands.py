"""`fairfleet client` and `fairfleet init`."""

from __future__ import annotations

import contextlib
import gc
import logging
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from fairfleet.client.agent import Agent
from fairfleet.client.conditions import condition
from fairfleet.client.priority import give_way
from fairfleet.client.replica import number_of
from fairfleet.client.settings import ClientSettings
from fairfleet.client.task import Task, load_task
from fairfleet.client.willing import Willing
from fairfleet.common import logs
from fairfleet.common.errors import UsageError
from fairfleet.common.program import LogFormat
from fairfleet.common.settings import read_settings
from fairfleet.common.tensors import Section

log = logging.getLogger(__name__)

TaskOption = Annotated[str | None, typer.Option(help="module:name of a Task, or of a function that makes one.")]
Options = Annotated[list[str] | None, typer.Option("--option", "-o", help="name=value for that function.")]


def client(
    task: TaskOption = None,
    server: Annotated[str | None, typer.Option(help="host:port of the server.")] = None,
    name: Annotated[str | None, typer.Option(help="This client's identity; default: the host name.")] = None,
    credentials: Annotated[
        Path | None, typer.Option(help="NAME.fleet, from `fairfleet enroll`: the server's address and this identity.")
    ] = None,
    insecure: Annotated[bool | None, typer.Option("--insecure", help="Speak to another machine in the clear.")] = None,
    option: Options = None,
    state_dir: Annotated[Path | None, typer.Option(help="Where unsent updates are kept.")] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu, cuda, cuda:1 or mps.")] = None,
    max_steps: Annotated[int | None, typer.Option(help="Solver steps per training, if the plan has more.")] = None,
    max_seconds: Annotated[
        float | None, typer.Option(help="Begin no step after so long; at least one is taken.")
    ] = None,
    max_memory_mb: Annotated[int | None, typer.Option(help="For one training step: batches get smaller.")] = None,
    when: Annotated[
        list[str] | None,
        typer.Option(help="Only while so: idle, mains, unmetered, run=COMMAND, module:name. May be repeated."),
    ] = None,
    niceness: Annotated[
        int | None,
        typer.Option(help="Give way to other programs here: 0 not at all, 19 always. Default: 10."),
    ] = None,
    metrics: Annotated[str | None, typer.Option(help="host:port for this client's own metrics.")] = None,
    least_noise: Annotated[
        float | None, typer.Option(help="Send no update with a smaller noise multiplier; see docs/privacy.md.")
    ] = None,
    config: Annotated[Path | None, typer.Option("--config", "-c", help="YAML file with settings.")] = None,
    log_format: LogFormat = "text",
    verbose: Annotated[bool, typer.Option("--verbose", "-v")] = False,
) -> None:
    """Take part in a federation with this machine's data. Data never leaves the machine.

    Examples:

      fairfleet client --credentials kitchen.fleet --task my_task:task

      fairfleet client --task fairfleet.lab.digits:softmax -o shard=3 --name client-3 --metrics 127.0.0.1:9441

      fairfleet client --task my_task:task --max-seconds 60 --max-memory-mb 500    (a small board does what it can)

      fairfleet client --task my_task:task --when mains --when unmetered --when idle
    """
    logs.set_up(verbose, log_format, "fairfleet-client")
    flags: dict[str, Any] = {"task": task, "server": server, "name": name, "state_dir": state_dir, "device": device}
    flags |= {"budget.steps": max_steps, "budget.seconds": max_seconds, "budget.memory_mb": max_memory_mb}
    flags |= {"metrics": metrics, "credentials": credentials, "insecure": insecure, "least_noise": least_noise}
    flags |= {"when": when or None, "niceness": niceness}
    given = {key: value for key, value in flags.items() if value is not None}
    if option:
        given["options"] = dict(_pair(text) for text in option)
    with _numbered(read_settings(ClientSettings, config, given)) as (numbered, replica):
        settings, access = numbered.identified()
        logs.say_always(client=settings.name)
        if replica is not None:
            log.info("this is replica %d: %s", replica, settings.name)
        give_way(settings.niceness)  # before the task is made, which may start threads
        folder = settings.state_dir / settings.name
        willing = Willing([condition(text) for text in settings.when], settings.when_seconds)
        made, least_noise = _task(settings), settings.least_noise
        agent = Agent(settings.name, made, access, folder, settings.budget, least_noise, willing)
        if settings.metrics:
            log.info("metrics on %s", _serve_metrics(agent, settings.name, settings.metrics))
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: agent.stop())
        gc.collect()
        gc.freeze()  # task and libraries stay: the collector need not look at them again, round after round
        print(f"{settings.name}: {agent.run()}")


def _serve_metrics(agent: Agent, name: str, listen: str) -> str:
    try:
        from fairfleet.client.metrics import serve
    except ModuleNotFoundError as error:
        raise UsageError("--metrics needs prometheus-client: pip install 'fairfleet[metrics]'") from error
    return serve(agent.telemetry, name, listen)


def init(
    task: Annotated[str, typer.Option(help="module:name of a Task, or of a function that makes one.")],
    output: Annotated[Path, typer.Option("--output", help="The file to write.")] = Path("model.safetensors"),
    option: Options = None,
    keep: Annotated[bool, typer.Option("--keep", help="Leave a file that exists already as it is.")] = False,
) -> None:
    """Write a task's untrained model to a .safetensors file, for `fairfleet server --model`.

    Example:

      fairfleet init --task my_task:task --output model.safetensors
    """
    if output.exists() and keep:
        print(f"{output}: kept")
        return
    if output.exists():
        raise UsageError(f"{output} exists already; remove it, give another --output, or --keep it")
    model = load_task(task, dict(_pair(text) for text in option or ())).initial_model()
    beside = output.with_name(f".{output.name}.part")  # a file that is kept later must be whole
    try:
        model.save(beside)
        beside.replace(output)
    except OSError as error:
        raise UsageError(f"cannot write {output}: {error.strerror}. Give another --output.") from error
    parameters = model.signature.size(Section.PARAMETERS)
    print(f"{output}: {len(model.signature.tensors)} tensors, {parameters:,} parameters")


@contextlib.contextmanager
def _numbered(settings: ClientSettings) -> Iterator[tuple[ClientSettings, int | None]]:
    """With this replica's number, where it is one of several; a claimed one is ours until the end."""
    if settings.replica is None:
        yield settings, None
        return
    with number_of(settings.replica, settings.state_dir) as number:
        yield settings.numbered(number), number


def _task(settings: ClientSettings) -> Task:
    task = load_task(settings.task, settings.options)
    if use_device := getattr(task, "use_device", None):
        use_device(settings.device)
    return task


def _pair(text: str) -> tuple[str, str]:
    name, found, value = text.partition("=")
    if not found:
        raise UsageError(f"--option {text!r} is not of the form name=value, for example shard=3")
    return name, value
