"""Evaluate models for a server that has test data of its own, in a process of its own.

The server starts `python -m fairfleet.client.cli.evaluation_worker` and imports nothing of it. The
first line on standard output says that the task is ready, or what is wrong with it. Then each line
on standard input names a model's file, and a line on standard output is the answer. All lines are
JSON objects. The process ends with its standard input, so it never outlives the server for long.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fairfleet.client.device.priority import give_way
from fairfleet.client.task import Task, load_task
from fairfleet.common.errors import UsageError, short
from fairfleet.common.tensors import Model

MAX_TEXT_CHARS = 300  # of a failure, as the server records it
Say = Callable[..., None]


def main(arguments: Sequence[str] | None = None) -> int:
    """Load the task, then evaluate until standard input ends; return the exit code."""
    options = _parser().parse_args(arguments)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the server, which ends this
    say, folder = _answers(), Path.cwd()  # a task may change the current directory
    give_way(options.niceness)  # before the task is made, because a task may start threads
    try:
        task = _usable_task(options.task, dict(options.option), options.model)
    except Exception as error:  # the task is a user's code and may raise anything
        say(error=_about_task(options.task, error))
        return 2
    say(ready=True)
    for line in sys.stdin:
        request = json.loads(line)
        say(version=request["version"], **_evaluated(task, folder / request["model"]))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="evaluation_worker", description=__doc__)
    parser.add_argument("--task", required=True)
    parser.add_argument("--model", required=True, type=Path, help="to compare the task's with")
    parser.add_argument("--niceness", type=int, default=0)
    parser.add_argument("--option", nargs=2, action="append", default=[])
    return parser


def _answers() -> Say:
    """Return a function that writes an object to standard output.

    What the task prints goes to standard error: the server's log.
    """
    output = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def say(**fields: Any) -> None:
        output.write(json.dumps(fields) + "\n")
        output.flush()

    return say


def _usable_task(spec: str, options: dict[str, str], model: Path) -> Task:
    """Return the task; raise UsageError if it cannot evaluate the federation's model."""
    task = load_task(spec, options)
    if not task.test_samples:
        raise UsageError(f"--task {spec} has no test data, so it cannot evaluate a model")
    committed, _ = Model.load(model)
    difference = committed.signature.difference(task.initial_model().signature)
    if difference:
        raise UsageError(f"--task {spec} has another model than the federation: {difference}")
    return task


def _about_task(spec: str, error: Exception) -> str:
    """Return what is wrong with the task, in the words of the server's options."""
    if isinstance(error, UsageError):
        text = str(error).replace("--task", "--evaluate-task")
        return text.replace("--option", "--evaluate-option")
    return f"--evaluate-task {spec}: {type(error).__name__}: {error}"


def _evaluated(task: Task, path: Path) -> dict[str, Any]:
    """Return the evaluation of a model as JSON, or why there is none."""
    began = time.perf_counter()
    try:
        model, _ = Model.load(path)
        evaluation = task.evaluate(model.named())
    except Exception as error:  # the task is a user's code and may raise anything
        failure = short(f"{type(error).__name__}: {error}", MAX_TEXT_CHARS)
        return {"failure": failure, "seconds": time.perf_counter() - began}
    return {
        "evaluation": evaluation.model_dump(mode="json", exclude_none=True),
        "seconds": time.perf_counter() - began,
    }


if __name__ == "__main__":
    sys.exit(main())
