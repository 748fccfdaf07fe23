"""`fairfleet demo`: a real server and ten real clients learn digits together, on this machine alone.

Two of the ten hold their images turned by 90 degrees: a minority that plain averaging serves badly.
"""

from __future__ import annotations

import contextlib
import enum
import fcntl
import importlib.util
import io
import json
import re
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.padding import Padding

from fairfleet.client import display
from fairfleet.client.task import load_task
from fairfleet.common.errors import UsageError
from fairfleet.lab import digits
from fairfleet.lab.local import LocalFederation, Result, run_federation
from fairfleet.lab.summary import as_json, summarise

MARK = ".fairfleet-demo"  # in a folder that is ours to replace; locked while a demo runs in it
PLAN = {"plan.steps": "10", "plan.learning_rate": "0.1", "plan.batch_size": "32", "round.evaluate_every": "10"}
ABOUT = (
    "Ten clients learn to read digits together, with a server of their own on this machine. Eight hold upright "
    "images; two, with 100 images each, hold them turned by 90°. Only models travel, the images stay."
)
REMARK = "The rotated clients hold a ninth of the images, and an average by samples listens to them accordingly."
SVG_COLUMNS = 96


class DemoTask(enum.StrEnum):
    SOFTMAX = "softmax"
    TORCH_MLP = "torch-mlp"


def demo(
    rounds: Annotated[int, typer.Option(min=1, help="How many rounds to train.")] = 100,
    task: Annotated[DemoTask, typer.Option(help="Softmax regression in numpy, or a small network in torch.")] = (
        DemoTask.SOFTMAX
    ),
    folder: Annotated[Path, typer.Option("--dir", help="For data, logs and the trained model; replaced if ours.")] = (
        Path("fairfleet-demo")
    ),
    json_: Annotated[bool, typer.Option("--json", help="For programs: only the result, as one JSON object.")] = False,
    svg: Annotated[Path | None, typer.Option(help="Save the summary as a picture, too.")] = None,
) -> None:
    """See a federation at work: a real server and ten real clients on this machine, for a few seconds.

    Examples:

      fairfleet demo

      fairfleet demo --rounds 20 --json
    """
    _end_on_signals()
    _check_installed(task)
    console = Console(highlight=False)
    with claimed(folder):
        if not json_:
            console.print(Padding(ABOUT, (1, 2)))
        shown = display.nothing() if json_ else display.for_people(console, transient=True)
        results = [run_federation(prepare(folder, task, rounds), shown)]
    if json_:
        print(json.dumps(as_json(results)))
    else:
        console.print(summarise(results, REMARK))
    if svg:
        picture(results, svg)


def prepare(folder: Path, task: DemoTask, rounds: int) -> LocalFederation:
    """Writes each client's own images and the untrained model: what a fleet has before it federates."""
    data, initial = folder / "data", folder / "initial.safetensors"
    digits.write_shards(data)
    spec = f"fairfleet.lab.digits:{task.replace('-', '_')}"
    clients = {name: {"shard": name, "data": str(data)} for name in digits.CLIENTS}
    load_task(spec, clients[digits.CLIENTS[0]]).initial_model().save(initial)
    return LocalFederation(
        name="demo",
        folder=folder / "fedavg",
        initial=initial,
        output=folder / "model.safetensors",
        rounds=rounds,
        task=spec,
        clients=clients,
        settings=PLAN,
    )


def picture(results: list[Result], output: Path) -> None:
    console = Console(record=True, width=SVG_COLUMNS, file=io.StringIO(), force_terminal=True, highlight=False)
    console.print(summarise(results, REMARK))
    svg = console.export_svg(title="fairfleet demo")
    svg = re.sub(r"@font-face {.*?}", "", svg, flags=re.DOTALL)  # whoever looks at it fetches nothing from elsewhere
    svg = svg.replace("Fira Code, monospace", "Menlo, 'DejaVu Sans Mono', Consolas, monospace")
    try:
        output.write_text(svg, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write {output}: {error.strerror}") from error


@contextlib.contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """The folder, empty and ours alone for the while. What an earlier demo left in it is removed; nothing else is."""
    try:
        foreign = folder.exists() and not (folder / MARK).exists() and (folder.is_file() or any(folder.iterdir()))
        if foreign:
            raise UsageError(
                f"{folder} exists and was not made by `fairfleet demo`, so it is not touched; give another --dir"
            )
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / MARK).open("a") as mark:
            try:
                fcntl.flock(mark, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UsageError(f"another demo is running in {folder}; wait for it, or give another --dir") from None
            for left in folder.iterdir():
                if left.is_dir():
                    shutil.rmtree(left)
                elif left.name != MARK:
                    left.unlink()
            yield
    except OSError as error:
        raise UsageError(f"cannot use {folder} for the demo: {error}; give another --dir") from error


def _check_installed(task: DemoTask) -> None:
    if task is DemoTask.TORCH_MLP and importlib.util.find_spec("torch") is None:
        raise UsageError("--task torch-mlp needs torch, which is not installed: pip install 'fairfleet[torch]'")


def _end_on_signals() -> None:
    """As Ctrl-C does: through the `with` that stops the processes."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
