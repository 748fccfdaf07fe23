"""Ways to run the program `fairfleet` without importing it each time, which takes seconds.

`ForkedProgram` is a process of its own. A fork server imports the program once per test run;
every process is a fork of it with its own arguments, environment, folder and standard streams.
Signals, exit codes, files and sockets are those of any process. `run_in_process` runs a command in
the process of the tests: its command line is parsed, and errors become messages and exit codes.
Tests of the program's start itself, of other versions and of processes behind another command
(`ip netns exec`, `strace`) start it the ordinary way.
"""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from multiprocessing import reduction
from pathlib import Path
from typing import Any, TextIO
from unittest import mock

from fairfleet.common.cli.program import run

PRELOADED = [
    "fairfleet.server.cli.server",
    "fairfleet.client.cli.client",
    "fairfleet.client.cli.control",
    "fairfleet.client.softmax",
    "sqlalchemy.dialects.sqlite",
    "asyncio",
]

PLAIN_TERMINAL = {"COLUMNS": "100", "TERM": "dumb"}

_forks = multiprocessing.get_context("forkserver")
_forks.set_forkserver_preload(PRELOADED)


class ForkedProgram:
    """A running `fairfleet WORDS`; the part of subprocess.Popen's interface that tests use.

    `stdout` is a pipe to read from, unless a file is given for it.
    """

    def __init__(
        self,
        words: Sequence[str],
        folder: Path,
        environment: Mapping[str, str],
        stderr: TextIO,
        stdout: TextIO | None = None,
    ) -> None:
        self.args = ["fairfleet", *words]
        self.stdout: TextIO | None = None
        if stdout is None:
            readable, writable = os.pipe()
            self.stdout = os.fdopen(readable, "r")
        else:
            writable = os.dup(stdout.fileno())
        try:
            # Both descriptors are duplicated into the new process when it starts.
            streams = [os.dup(writable), os.dup(stderr.fileno())]
            self._process = _forks.Process(
                target=_run,
                args=(list(words), str(folder), dict(environment), _Descriptors(streams)),
            )
            self._process.start()
            for descriptor in streams:
                os.close(descriptor)
        finally:
            os.close(writable)
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        """The exit code, negative for a signal; None while the process runs."""
        return self._process.exitcode

    def poll(self) -> int | None:
        """Return the exit code, or None while the process runs."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end of the process and return its exit code."""
        self._process.join(timeout)
        if (code := self._process.exitcode) is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return code

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        if self._process.exitcode is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)


def run_forked(
    words: Sequence[str], folder: Path, environment: Mapping[str, str], timeout: float
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end and return what it printed."""
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        process = ForkedProgram(words, folder, environment, errors, output)
        try:
            code = process.wait(timeout)
        finally:
            process.kill()
        texts = [_content(file) for file in (output, errors)]
    return subprocess.CompletedProcess(process.args, code, *texts)


def run_in_process(*words: str, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run a command in a folder, on a terminal of 100 columns, and return what it printed."""
    output, errors, code = io.StringIO(), io.StringIO(), 0
    with (
        contextlib.chdir(folder or Path.cwd()),
        contextlib.redirect_stdout(output),
        contextlib.redirect_stderr(errors),
        mock.patch.object(sys, "argv", ["fairfleet", *words]),
        mock.patch.dict("os.environ", PLAIN_TERMINAL),
    ):
        try:
            run()
        except SystemExit as end:
            code = int(end.code or 0)
    return subprocess.CompletedProcess(words, code, output.getvalue(), errors.getvalue())


def _content(file: Any) -> str:
    file.seek(0)
    text: str = file.read()
    return text


class _Descriptors:
    """Descriptors that are passed to a process when they are pickled as its arguments."""

    def __init__(self, numbers: list[int]) -> None:
        self.numbers = numbers

    def __reduce__(self) -> tuple[Any, ...]:
        return _received, ([reduction.DupFd(number) for number in self.numbers],)


def _received(duplicates: list[Any]) -> _Descriptors:
    return _Descriptors([duplicate.detach() for duplicate in duplicates])


def _run(words: list[str], folder: str, environment: dict[str, str], streams: _Descriptors) -> None:
    """Be the program: in the forked process, from its first instruction to its exit code."""
    for number, descriptor in zip((1, 2), streams.numbers, strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)
    # The fork server's own streams are buffered objects of another file; these are as at a start.
    sys.stdout = io.TextIOWrapper(io.FileIO(1, "w", closefd=False), write_through=True)
    sys.stderr = io.TextIOWrapper(io.FileIO(2, "w", closefd=False), write_through=True)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.argv = ["fairfleet", *words]
    from fairfleet.common.cli.main import main

    main()
