"""Conditions under which a machine trains: idle, on mains, unmetered network, or a user's own.

Each condition is a function that returns the reason why the machine may not train now, or an empty
string. What cannot be determined counts as no: a device that stays away does no harm, but one that
drains its owner's battery does.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from fairfleet.common.cli.user_modules import import_user_module
from fairfleet.common.errors import UsageError, short

Condition = Callable[[], str]  # the reason not to train now; empty if there is none

SYSTEM_DEVICES = Path("/sys/class")  # exists on every Linux
SUPPLIES = SYSTEM_DEVICES / "power_supply"
BUSY_PERCENT = 25.0
SHORTEST_WINDOW_SECONDS = 1.0
COMMAND_SECONDS = 20.0  # a command that takes longer hangs
NETWORK_MANAGER = "org.freedesktop.NetworkManager"
METERED = (
    "busctl",
    "get-property",
    NETWORK_MANAGER,
    f"/{NETWORK_MANAGER.replace('.', '/')}",
    NETWORK_MANAGER,
    "Metered",
)
# NMMetered: 2 is no, 4 is guessed no; 1 and 3 are yes and guessed yes, 0 is unknown.
UNMETERED = {"u 2", "u 4"}


def condition(text: str) -> Condition:
    """Return the condition for a value of `--when`.

    It is one of idle, idle=25, mains, unmetered, run=COMMAND, or module:name of a function.
    Raises UsageError for anything else.
    """
    name, _, value = text.partition("=")
    if name == "idle":
        return Idle(_parse_percent(text, value))
    if name == "mains":
        return _mains(Path(value or SUPPLIES))
    if text == "unmetered":
        return on_unmetered_network
    if name == "run" and value:
        return lambda: _run_command(value)
    if ":" in text:
        return _import_condition(text)
    raise UsageError(
        f"--when {text!r} is none of idle, idle=25 (percent), mains, unmetered, run=COMMAND and "
        "module:name. The command must exit with 0, or the function return True, when this "
        "machine may train."
    )


def _parse_percent(text: str, value: str) -> float:
    try:
        percent = float(value or BUSY_PERCENT)
    except ValueError:
        percent = -1.0
    if not 0 < percent <= 100:
        raise UsageError(
            f"--when {text!r}: a percentage above 0 and up to 100 is expected, for example idle=25"
        )
    return percent


class CpuTicks(NamedTuple):
    """Processor time in ticks since the start of the machine, or of this process."""

    busy: float  # used by all processes
    total: float  # used and idle
    own: float  # used by this process and its children


class Idle:
    """True while other processes use little of the processors, measured since the last call.

    This process does not count, or its own training would stop it. The load average would include
    it, and it lags by a minute.
    """

    def __init__(self, percent: float, stat: Path = Path("/proc/stat")) -> None:
        self._percent, self._stat = percent, stat
        self._since, self._last = time.monotonic(), self._read_ticks()

    def __call__(self) -> str:
        """Return the load by others if it is above the limit, else an empty string."""
        time.sleep(max(0.0, SHORTEST_WINDOW_SECONDS - (time.monotonic() - self._since)))
        now, before = self._read_ticks(), self._last
        self._since, self._last = time.monotonic(), now
        elapsed = now.total - before.total
        if elapsed <= 0:
            return "the processors' time cannot be read"
        by_others = max(0.0, now.busy - before.busy - (now.own - before.own))
        percent = 100.0 * by_others / elapsed
        return f"others use {percent:.0f} % of the processors" if percent > self._percent else ""

    def _read_ticks(self) -> CpuTicks:
        try:
            words = self._stat.read_text().split("\n", 1)[0].split()
            user, nice, system, idle, iowait, irq, softirq, *_ = (int(word) for word in words[1:])
        except (OSError, ValueError) as error:
            raise UsageError(
                f"--when idle needs {self._stat}, which exists on Linux: {error}"
            ) from error
        busy = user + nice + system + irq + softirq
        own = sum(os.times()[:4]) * os.sysconf("SC_CLK_TCK")
        return CpuTicks(busy, busy + idle + iowait, own)


def _mains(supplies: Path) -> Condition:
    """Return the condition `mains`; raise UsageError on a system that does not say it in files."""
    if not SYSTEM_DEVICES.is_dir():
        raise UsageError(
            f"--when mains reads {supplies}, which exists on Linux only. Use --when run=COMMAND "
            "with a command that exits with 0 while this machine may train."
        )
    return lambda: on_mains(supplies)


def on_mains(supplies: Path = SUPPLIES) -> str:
    """Return a reason while a battery is being drained.

    A board without a battery is on mains.
    """
    batteries = []
    for supply in sorted(supplies.glob("*")):
        if _read_word(supply, "scope") == "Device":  # of a mouse, for example: always online
            continue
        if _read_word(supply, "type") == "Battery":
            batteries.append(_read_word(supply, "status"))
        elif _read_word(supply, "online") == "1":
            return ""
    drained = [status for status in batteries if status not in ("Charging", "Full", "Not charging")]
    return f"on battery ({drained[0].lower() or 'unknown'})" if drained else ""


def _read_word(supply: Path, name: str) -> str:
    try:
        return (supply / name).read_text().strip()
    except OSError:
        return ""


def on_unmetered_network() -> str:
    """Return a reason unless NetworkManager reports the connection in use as unmetered."""
    try:
        result = subprocess.run(
            METERED, capture_output=True, text=True, timeout=COMMAND_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"NetworkManager cannot be queried: {error}"
    if result.returncode:
        reason = short(result.stderr.strip() or "no reason given", 160)
        return f"NetworkManager does not answer: {reason}"
    is_unmetered = result.stdout.strip() in UNMETERED
    return "" if is_unmetered else "the network is metered, or this is unknown"


def _run_command(command: str) -> str:
    """Return why a shell command failed: its last line of output, or its exit code."""
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command,
        shell=True,
        stdout=pipe,
        stderr=pipe,
        text=True,
        errors="replace",
        start_new_session=True,
    ) as process:
        try:
            out, errors = process.communicate(timeout=COMMAND_SECONDS)
        except subprocess.TimeoutExpired:
            _kill(process)
            return f"{short(command)} did not end within {COMMAND_SECONDS:g} s"
    if process.returncode == 0:
        return ""
    lines = (out.strip() or errors.strip()).splitlines()
    return short(lines[-1], 160) if lines else f"{short(command)} ended with {process.returncode}"


def _kill(process: subprocess.Popen[str]) -> None:
    """Kill a shell and everything that it started; on Windows, only the shell."""
    if hasattr(os, "killpg"):
        os.killpg(process.pid, signal.SIGKILL)
    else:
        process.kill()


def _import_condition(text: str) -> Condition:
    """Return a user's function as a condition. It returns True for yes, or the reason for no."""
    function = _import_function(text)

    def evaluate() -> str:
        answer = function()
        if answer is True:
            return ""
        return answer if isinstance(answer, str) and answer else f"{text} says no"

    return evaluate


def _import_function(text: str) -> Callable[[], object]:
    module, _, name = text.partition(":")
    try:
        function: object = getattr(import_user_module(module), name)
    except Exception as error:  # the module is a user's code and may raise anything
        raise UsageError(f"--when {text}: {type(error).__name__}: {error}") from error
    if not callable(function):
        raise UsageError(f"--when {text} is {type(function).__name__}, not a function")
    return function
