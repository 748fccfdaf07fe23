"""Evaluate models for a server that has test data of its own, in a process of its own.

The server starts `python -m fairfleet.client.cli.evaluation_worker` and imports nothing of it. The
first line on standard output says that the task is ready, or what is wrong with it. Then each line
on standard input names a model's file, and a line on standard output is the answer. All lines are
JSON objects. When standard input ends, the process ends at once, whatever the task does: it never
outlives the server.
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
from queue import SimpleQueue
from threading import Thread
from typing import Any

from fairfleet.client.device.priority import give_way
from fairfleet.client.task import Task, load_task
from fairfleet.common.errors import UsageError, short
from fairfleet.common.reports import Evaluation
from fairfleet.common.tensors import Model

MAX_TEXT_CHARS = 300  # of a failure, as the server records it
Say = Callable[..., None]


def main(arguments: Sequence[str] | None = None) -> int:
    """Load the task, then evaluate until standard input ends; return the exit code of a failure."""
    options = _parser().parse_args(arguments)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the server, which ends this
    say, folder = _answers(), Path.cwd()  # a task may change the current directory
    requests = _requests()
    give_way(options.niceness)  # before the task is made, because a task may start threads
    try:
        task = _usable_task(options.task, dict(options.option), options.model)
    except Exception as error:  # the task is a user's code and may raise anything
        say(error=_about_task(options.task, error))
        return 2
    say(ready=True)
    while True:
        request = json.loads(requests.get())
        say(version=request["version"], **_evaluated(task, folder / request["model"]))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="evaluation_worker", description=__doc__)
    parser.add_argument("--task", required=True)
    parser.add_argument("--model", required=True, type=Path, help="to compare the task's with")
    parser.add_argument("--niceness", type=int, default=0)
    parser.add_argument("--option", nargs=2, action="append", default=[])
    return parser


def _requests() -> SimpleQueue[bytes]:
    """Return the lines of standard input, as they come; the process ends with it.

    The task gets an empty standard input. The thread holds no lock of Python's streams while it
    waits, so that a task can fork.
    """
    lines, requests = SimpleQueue[bytes](), os.fdopen(os.dup(sys.stdin.fileno()), "rb", buffering=0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, sys.stdin.fileno())
    os.close(nothing)

    def read() -> None:
        for line in requests:
            lines.put(line)
        os._exit(0)

    Thread(target=read, name="requests", daemon=True).start()
    return lines


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
        if not isinstance(evaluation, Evaluation):
            found = type(evaluation).__name__
            raise UsageError(f"Task.evaluate returned {found}, expected Evaluation")
    except Exception as error:  # the task is a user's code and may raise anything
        failure = short(f"{type(error).__name__}: {error}", MAX_TEXT_CHARS)
        return {"failure": failure, "seconds": time.perf_counter() - began}
    return {
        "evaluation": evaluation.model_dump(mode="json", exclude_none=True),
        "seconds": time.perf_counter() - began,
    }


if __name__ == "__main__":
    sys.exit(main())
