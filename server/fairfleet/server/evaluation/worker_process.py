"""The process that evaluates models on the server's own test data.

The server imports neither the task nor anything of the client: it starts the client's worker by
name and exchanges lines of JSON with it. A worker that dies or hangs costs one evaluation.
"""

from __future__ import annotations

import asyncio
import json
import sys
from asyncio.subprocess import PIPE, Process
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from fairfleet.common.errors import UsageError, short
from fairfleet.common.reports import Evaluation
from fairfleet.server.settings import ServerEvaluationSettings
from fairfleet.server.storage.server_evaluation_table import ServerEvaluation

MODULE = "fairfleet.client.cli.evaluation_worker"
PACKAGE = "fairfleet.client"
READY_SECONDS = 600.0  # for imports and for reading the test data
ENDING_SECONDS = 5.0  # between the end of the output and that of the process
ANSWER_BYTES = 1 << 20  # the longest line of an answer


class WorkerDied(Exception):
    """The worker ended, or its answer cannot be read."""


class WorkerProcess:
    """A running worker whose task is loaded."""

    def __init__(self, process: Process) -> None:
        self._process = process

    @classmethod
    async def start(cls, settings: ServerEvaluationSettings, model: Path) -> WorkerProcess:
        """Start a worker and wait until its task is loaded.

        `model` is a file of the federation's model. Raises UsageError if the task cannot be used.
        """
        if find_spec(PACKAGE) is None:
            raise UsageError(
                f"--evaluate-task needs {PACKAGE}, which is not installed here; install all of "
                "fairfleet beside the server, or leave out --evaluate-task"
            )
        words = ["--task", settings.task, "--niceness", str(settings.niceness)]
        words += ["--model", str(model)]
        for name, value in settings.options.items():
            words += ["--option", name, value]
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", MODULE, *words, stdin=PIPE, stdout=PIPE, limit=ANSWER_BYTES
        )
        worker = cls(process)
        try:
            answer = await asyncio.wait_for(worker._answer(), READY_SECONDS)
        except (WorkerDied, TimeoutError) as error:
            await worker.stop()
            why = str(error) or f"it was not ready after {READY_SECONDS:g} s"
            raise UsageError(
                f"--evaluate-task {settings.task}: the worker process could not start: {why}"
            ) from None
        except BaseException:
            await worker.stop()
            raise
        if not answer.get("ready"):
            await worker.stop()
            raise UsageError(str(answer.get("error")))
        return worker

    async def evaluate(self, version: int, model: Path) -> ServerEvaluation:
        """Return what the worker says about a model; raise WorkerDied if it says nothing."""
        assert self._process.stdin is not None
        request = {"version": version, "model": str(model)}
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            await self._process.stdin.drain()
        except ConnectionError:
            raise WorkerDied(await self._ending()) from None
        answer = await self._answer()
        seconds = float(answer.get("seconds", 0.0))
        if "evaluation" not in answer:
            failure = short(str(answer.get("failure", "it gave no reason")), 300)
            return ServerEvaluation(version, None, failure, seconds)
        try:
            evaluation = Evaluation.model_validate(answer["evaluation"])
        except ValidationError as error:
            raise WorkerDied(f"its answer cannot be read: {error}") from None
        return ServerEvaluation(version, evaluation, "", seconds)

    async def stop(self) -> None:
        """End the process at once; an evaluation under way is lost."""
        with suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()

    async def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        try:
            line = await self._process.stdout.readline()
            answer = json.loads(line) if line else None
        except ValueError as error:  # no JSON, or a line beyond the limit
            raise WorkerDied(f"its answer cannot be read: {error}") from None
        if not isinstance(answer, dict):
            raise WorkerDied(await self._ending())
        return answer

    async def _ending(self) -> str:
        """Return how the process ended; one that only closed its output is ended after a while.

        A signal to a process that has just ended would hide how it did.
        """
        try:
            await asyncio.wait_for(self._process.wait(), ENDING_SECONDS)
        except TimeoutError:
            await self.stop()
        code = self._process.returncode or 0
        return f"it ended by signal {-code}" if code < 0 else f"it ended with exit code {code}"
