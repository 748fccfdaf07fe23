"""Server and clients as real processes on this machine; none of them outlives the demo.

They stay in the demo's process group, so Ctrl-C or a closed terminal reaches them, too.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from fairfleet.common.errors import FleetError

LOOK_SECONDS = 0.02
STOP_SECONDS = 5.0  # after SIGTERM; then processes are killed
LOG_TAIL = 15  # lines


class ProcessEnded(FleetError):
    """A process of the group ended, or did not, when that was not expected."""


class ProcessGroup:
    """Runs `fairfleet` processes by name; use it as a context manager, which stops them all."""

    def __init__(self, logs: Path) -> None:
        logs.mkdir(parents=True)
        self._logs = logs
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> ProcessGroup:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self, name: str, *arguments: str) -> None:
        """Run `fairfleet <arguments>`. The name is for messages and for the process's log file."""
        command = [sys.executable, "-m", "fairfleet.common.cli", *arguments]
        with self._log(name).open("wb") as log:
            self._processes[name] = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=_environment(),
            )

    def wait_for_line(self, name: str, opening: str, seconds: float) -> str:
        """Wait for a log line that starts with `opening`, and return the rest of it.

        Raises ProcessEnded if the process ends first, or if it takes longer than `seconds`.
        """
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if self._processes[name].poll() is not None:
                raise self.unexpected(name)
            for line in self._log(name).read_text("utf-8", "replace").splitlines(keepends=True):
                if line.startswith(opening) and line.endswith("\n"):
                    return line.removeprefix(opening).strip()
            time.sleep(LOOK_SECONDS)
        raise ProcessEnded(
            f"{name} did not print {opening!r} within {seconds:.0f} s. {self._tail(name)}"
        )

    def ended(self) -> list[str]:
        """Return the names of the processes that have ended."""
        return [name for name, process in self._processes.items() if process.poll() is not None]

    def unexpected(self, name: str) -> ProcessEnded:
        """Return the error for a process that has ended, with the end of its log."""
        code = self._processes[name].returncode
        return ProcessEnded(f"{name} ended unexpectedly ({_exit_text(code)}). {self._tail(name)}")

    def finish(self, name: str, seconds: float) -> None:
        """Wait for a process that ends by itself.

        Raises ProcessEnded if it fails or takes longer than `seconds`.
        """
        try:
            code = self._processes[name].wait(seconds)
        except subprocess.TimeoutExpired:
            raise ProcessEnded(
                f"{name} did not end within {seconds:.0f} s. {self._tail(name)}"
            ) from None
        if code:
            raise self.unexpected(name)

    def stop(self) -> None:
        """Terminate all processes, and kill those that are still running after a while."""
        try:
            for process in self._processes.values():
                process.terminate()
            deadline = time.monotonic() + STOP_SECONDS
            for process in self._processes.values():
                process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            pass
        finally:  # This also runs if a second Ctrl-C interrupts the wait.
            for process in self._processes.values():
                process.kill()
                process.wait()
            self._processes.clear()

    def _log(self, name: str) -> Path:
        return self._logs / f"{name}.log"

    def _tail(self, name: str) -> str:
        lines = self._log(name).read_text("utf-8", "replace").splitlines()[-LOG_TAIL:]
        shown = "\n".join(f"  {line}" for line in lines) or "  (nothing)"
        return f"The end of its log, {self._log(name)}:\n{shown}"


def _environment() -> dict[str, str]:
    """Return this process's environment, without settings that are meant for other federations.

    Each of the many small processes gets one thread for its numerics. Each sets gRPC's verbosity
    for itself, so this process's choice is not passed on.
    """
    excluded = ("FAIRFLEET_", "GRPC_VERBOSITY")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(excluded)}
    return inherited | {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}


def _exit_text(code: int) -> str:
    return f"killed by signal {-code}" if code < 0 else f"exit code {code}"
