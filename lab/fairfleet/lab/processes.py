"""Server and clients as real processes on this machine: started, watched, and none left behind.

They stay in our process group, so that a terminal that goes away or a Ctrl-C reaches them too.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from fairfleet.common.errors import FleetError

LOOK_SECONDS = 0.02
STOP_SECONDS = 5.0  # for a polite end; then they are killed
LOG_TAIL = 15  # lines


class ProcessEnded(FleetError):
    """One of ours ended when it should not have."""


class Crew:
    def __init__(self, logs: Path) -> None:
        logs.mkdir(parents=True)
        self._logs = logs
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self, name: str, *arguments: str) -> None:
        """Runs `fairfleet <arguments>`, under a name that messages use; its output goes to its log."""
        command = [sys.executable, "-m", "fairfleet.common.cli", *arguments]
        with self._log(name).open("wb") as log:
            self._processes[name] = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=_environment()
            )

    def said(self, name: str, opening: str, seconds: float) -> str:
        """The rest of the first line that a process begins so, once it has said it."""
        ends = time.monotonic() + seconds
        while time.monotonic() < ends:
            if self._processes[name].poll() is not None:
                raise self.unexpected(name)
            for line in self._log(name).read_text("utf-8", "replace").splitlines(keepends=True):
                if line.startswith(opening) and line.endswith("\n"):
                    return line.removeprefix(opening).strip()
            time.sleep(LOOK_SECONDS)
        raise ProcessEnded(f"{name} did not say {opening!r} within {seconds:.0f} s. {self._tail(name)}")

    def ended(self) -> list[str]:
        return [name for name, process in self._processes.items() if process.poll() is not None]

    def unexpected(self, name: str) -> ProcessEnded:
        code = self._processes[name].returncode
        return ProcessEnded(f"{name} ended unexpectedly ({_in_words(code)}). {self._tail(name)}")

    def finish(self, name: str, seconds: float) -> None:
        """Waits for a process that ends by itself, and checks that it ended well."""
        try:
            code = self._processes[name].wait(seconds)
        except subprocess.TimeoutExpired:
            raise ProcessEnded(f"{name} did not end within {seconds:.0f} s. {self._tail(name)}") from None
        if code:
            raise self.unexpected(name)

    def stop(self) -> None:
        try:
            for process in self._processes.values():
                process.terminate()
            ends = time.monotonic() + STOP_SECONDS
            for process in self._processes.values():
                process.wait(max(0.0, ends - time.monotonic()))
        except subprocess.TimeoutExpired:
            pass
        finally:  # also when a second Ctrl-C comes while we wait
            for process in self._processes.values():
                process.kill()
                process.wait()
            self._processes.clear()

    def _log(self, name: str) -> Path:
        return self._logs / f"{name}.log"

    def _tail(self, name: str) -> str:
        lines = self._log(name).read_text("utf-8", "replace").splitlines()[-LOG_TAIL:]
        said = "\n".join(f"  {line}" for line in lines) or "  (nothing)"
        return f"The end of its log, {self._log(name)}:\n{said}"


def _environment() -> dict[str, str]:
    """Ours, without settings meant for other federations; many small processes want one thread each.

    How much gRPC tells is for each process to settle, as we have done for ourselves.
    """
    others = ("FAIRFLEET_", "GRPC_VERBOSITY")
    own = {name: value for name, value in os.environ.items() if not name.startswith(others)}
    return own | {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}


def _in_words(code: int) -> str:
    return f"killed by signal {-code}" if code < 0 else f"exit code {code}"
