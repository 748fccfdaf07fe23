"""`fairfleet demo`: a real server and ten real clients learn digits together on this machine.

Two of the ten clients hold images that are rotated by 90 degrees: a minority that plain averaging
serves badly. So the same fleet trains twice, with plain averaging and with a fair rule, and the two
results are shown side by side.
"""

from __future__ import annotations

import contextlib
import enum
import io
import json
import re
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, TextIO

import typer
from filelock import lock_descriptor
from rich.console import Console
from rich.padding import Padding

from fairfleet.client.operator import display
from fairfleet.client.task import load_task
from fairfleet.common.errors import UsageError
from fairfleet.common.extras import require
from fairfleet.lab import digits
from fairfleet.lab.demo.local_federation import LocalFederation, Result, run_federation
from fairfleet.lab.demo.summary import as_json, summarise
from fairfleet.lab.experiments.rule_spec import name_and_parameters
from fairfleet.server.rules import RuleError, recipe

MARK = ".fairfleet-demo"  # marks a folder that a demo may replace; locked while a demo runs
PLAN = {
    "plan.steps": "10",
    "plan.learning_rate": "0.1",
    "plan.batch_size": "32",
    "round.evaluate_every": "10",
}
ABOUT = (
    "Ten clients and a server on this machine learn to read digits together. Eight clients hold "
    "upright images; two, with 100 images each, hold rotated ones (by 90°). Only models travel, "
    "the images stay where they are."
)
REMARK = (
    "The rotated clients hold a ninth of the images, so they have a ninth of the weight "
    "in an average by samples."
)
RULES = ["fedavg", "fedlf"]
SVG_COLUMNS = 96
SERVER_LIBRARIES = ("sqlalchemy", "grpc_health", "grpc_reflection", "prometheus_client")


class DemoTask(enum.StrEnum):
    """What the clients of the demo train."""

    SOFTMAX = "softmax"
    TORCH_MLP = "torch-mlp"


RulesOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="RULE",
        help="name or name,parameter=value,…. Repeat it to compare rules.",
        show_default=" and ".join(RULES),
    ),
]
TaskOption = Annotated[
    DemoTask, typer.Option(help="Softmax regression in numpy, or a small network in torch.")
]
Folder = Annotated[
    Path,
    typer.Option("--dir", help="Folder for data, logs and models. A demo's folder is replaced."),
]
Json = Annotated[
    bool,
    typer.Option("--json", help="Print only the result, as one JSON object.", show_default="off"),
]
Svg = Annotated[
    Path | None, typer.Option(help="Also save the summary as a picture.", show_default="off")
]


def demo(
    rounds: Annotated[int, typer.Option(min=1, help="Number of rounds to train.")] = 100,
    rule: RulesOption = None,
    task: TaskOption = DemoTask.SOFTMAX,
    folder: Folder = Path("fairfleet-demo"),
    json_: Json = False,
    svg: Svg = None,
) -> None:
    """Run a demo federation with ten clients on this machine.

    It takes about half a minute, and compares plain averaging with a fair rule.

    Examples:

      fairfleet demo

      fairfleet demo --rounds 20 --json

      fairfleet demo --rule fedavg --rule adafed,gamma=5
    """
    _end_on_signals()
    _check_installed(task)
    console = Console(highlight=False)
    with claimed(folder):
        if not json_:
            console.print(Padding(ABOUT, (1, 2)))
        results = []
        for federation in prepare(folder, task, rounds, rule or RULES):
            if not json_:
                console.print(f"  Aggregation by [bold]{federation.rule}[/]:")
            screen = display.nothing() if json_ else display.for_people(console, transient=True)
            results.append(run_federation(federation, screen))
    if json_:
        print(json.dumps(as_json(results)))
    else:
        console.print(summarise(results, REMARK))
    if svg:
        save_picture(results, svg)


def prepare(folder: Path, task: DemoTask, rounds: int, rules: list[str]) -> list[LocalFederation]:
    """Write each client's images and the untrained model, and return the federations to run.

    Raises UsageError for a wrong rule, before anything is written or started.
    """
    chosen = {text: rule_settings(text) for text in rules}
    data, initial = folder / "data", folder / "initial.safetensors"
    digits.write_shards(data)
    spec = f"fairfleet.lab.digits:{task.replace('-', '_')}"
    clients = {name: {"shard": name, "data": str(data)} for name in digits.CLIENTS}
    load_task(spec, clients[digits.CLIENTS[0]]).initial_model().save(initial)
    return [
        LocalFederation(
            name="demo",
            rule=text,
            folder=folder / text,
            initial=initial,
            output=folder / f"{text}.safetensors",
            rounds=rounds,
            task=spec,
            clients=clients,
            settings=PLAN | settings,
        )
        for text, settings in chosen.items()
    ]


def rule_settings(text: str) -> dict[str, str]:
    """Return a rule such as `adafed,gamma=5` as settings of the server."""
    name, parameters = name_and_parameters(text)
    try:
        recipe(name, **parameters)
    except RuleError as error:
        raise UsageError(f"--rule {text}: {error}") from None
    return {"rule.name": name, **{f"rule.{key}": value for key, value in parameters.items()}}


def save_picture(results: list[Result], output: Path) -> None:
    """Save the summary as an SVG file."""
    console = Console(
        record=True, width=SVG_COLUMNS, file=io.StringIO(), force_terminal=True, highlight=False
    )
    console.print(summarise(results, REMARK))
    svg = console.export_svg(title="fairfleet demo")
    # Without the font declarations, a viewer of the picture fetches nothing from other sites.
    svg = re.sub(r"@font-face {.*?}", "", svg, flags=re.DOTALL)
    svg = svg.replace("Fira Code, monospace", "Menlo, 'DejaVu Sans Mono', Consolas, monospace")
    try:
        output.write_text(svg, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write {output}: {error.strerror}") from error


@contextlib.contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """Provide the folder empty, and for this demo alone, until the end of the context.

    What an earlier demo wrote to it is removed. Raises UsageError for a folder that no demo made,
    which is not touched, and for one that another demo uses.
    """
    try:
        _check_replaceable(folder)
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / MARK).open("a") as mark:
            _lock(mark, folder)
            _clear(folder)
            yield
    except OSError as error:
        raise UsageError(
            f"cannot use {folder} for the demo: {error}; give another --dir"
        ) from error


def _check_replaceable(folder: Path) -> None:
    if not folder.exists() or (folder / MARK).exists():
        return
    if folder.is_file() or any(folder.iterdir()):
        raise UsageError(
            f"{folder} exists and was not made by `fairfleet demo`, so it is not touched; "
            "give another --dir"
        )


def _lock(mark: TextIO, folder: Path) -> None:
    if not lock_descriptor(mark.fileno(), blocking=False):
        raise UsageError(f"another demo is running in {folder}; wait for it, or give another --dir")


def _clear(folder: Path) -> None:
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name != MARK:
            path.unlink()


def _check_installed(task: DemoTask) -> None:
    if task is DemoTask.TORCH_MLP:
        require("--task torch-mlp", "torch")
    # The server is a process of its own, so this one does not import what the server needs.
    require("`fairfleet demo`", "sklearn", *SERVER_LIBRARIES, extras="lab")


def _end_on_signals() -> None:
    """Let signals end the demo as Ctrl-C does: the context managers stop the processes."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
