"""Conditions under which a machine takes part: idle, on mains, on an unmetered network, or anything of one's own.

Each is a function that answers why not, or nothing when now is fine. What cannot be found out counts as no: a device
that stays away harms nobody, one that empties its owner's battery does.
"""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from fairfleet.common.errors import UsageError, short

Condition = Callable[[], str]  # why not; empty: now is fine

SUPPLIES = Path("/sys/class/power_supply")
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
UNMETERED = {"u 2", "u 4"}  # NMMetered: no, and guessed no; 1 and 3 are yes and guessed yes, 0 is unknown


def condition(text: str) -> Condition:
    """What `--when` says: idle, idle=25, mains, unmetered, run=COMMAND, or module:name of a function."""
    name, _, value = text.partition("=")
    if name == "idle":
        return Idle(_percent(text, value))
    if name == "mains":
        return lambda: on_mains(Path(value or SUPPLIES))
    if text == "unmetered":
        return on_unmetered_network
    if name == "run" and value:
        return lambda: _run(value)
    if ":" in text:
        return _imported(text)
    raise UsageError(
        f"--when {text!r} is none of idle, idle=25 (percent), mains, unmetered, run=COMMAND and module:name, where the "
        "command exits with 0, or the function returns True, when now is fine"
    )


def _percent(text: str, value: str) -> float:
    try:
        percent = float(value or BUSY_PERCENT)
    except ValueError:
        percent = -1.0
    if not 0 < percent <= 100:
        raise UsageError(f"--when {text!r}: a percentage above 0 and up to 100 is expected, for example idle=25")
    return percent


class Idle:
    """Others use little of the processors, since it was last asked. Own work does not count: it would stop itself.

    The load average would count it, and lags by a minute.
    """

    def __init__(self, percent: float, stat: Path = Path("/proc/stat")) -> None:
        self._percent, self._stat = percent, stat
        self._since, self._last = time.monotonic(), self._look()

    def __call__(self) -> str:
        time.sleep(max(0.0, SHORTEST_WINDOW_SECONDS - (time.monotonic() - self._since)))
        (busy, total, own), before = self._look(), self._last
        self._since, self._last = time.monotonic(), (busy, total, own)
        ticks = total - before[1]
        if ticks <= 0:
            return "the processors' time cannot be read"
        others = 100.0 * max(0.0, busy - before[0] - (own - before[2])) / ticks
        return f"others use {others:.0f} % of the processors" if others > self._percent else ""

    def _look(self) -> tuple[float, float, float]:
        """In ticks since the start: what was done, what could have been, and what of it this process did."""
        try:
            words = self._stat.read_text().split("\n", 1)[0].split()
            user, nice, system, idle, iowait, irq, softirq, *_ = (int(word) for word in words[1:])
        except (OSError, ValueError) as error:
            raise UsageError(f"--when idle needs {self._stat}, as Linux has it: {error}") from error
        busy = user + nice + system + irq + softirq
        own = sum(os.times()[:4]) * os.sysconf("SC_CLK_TCK")
        return busy, busy + idle + iowait, own


def on_mains(supplies: Path = SUPPLIES) -> str:
    """A board without a battery is on mains; one with a battery, while it is not drained."""
    batteries = []
    for supply in sorted(supplies.glob("*")):
        if _word(supply, "scope") == "Device":  # a mouse's, which is always online
            continue
        if _word(supply, "type") == "Battery":
            batteries.append(_word(supply, "status"))
        elif _word(supply, "online") == "1":
            return ""
    drained = [status for status in batteries if status not in ("Charging", "Full", "Not charging")]
    return f"on battery ({drained[0].lower() or 'unknown'})" if drained else ""


def _word(supply: Path, name: str) -> str:
    try:
        return (supply / name).read_text().strip()
    except OSError:
        return ""


def on_unmetered_network() -> str:
    """As NetworkManager says of the connection in use."""
    try:
        done = subprocess.run(METERED, capture_output=True, text=True, timeout=COMMAND_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"NetworkManager cannot be asked: {error}"
    if done.returncode:
        return f"NetworkManager does not answer: {short(done.stderr.strip() or 'no reason given', 160)}"
    return "" if done.stdout.strip() in UNMETERED else "the network is metered, or nobody knows"


def _run(command: str) -> str:
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, shell=True, stdout=pipe, stderr=pipe, text=True, errors="replace", start_new_session=True
    ) as process:
        try:
            out, errors = process.communicate(timeout=COMMAND_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # the shell, and what it has started
            return f"{short(command)} did not end within {COMMAND_SECONDS:g} s"
    if process.returncode == 0:
        return ""
    said = (out.strip() or errors.strip()).splitlines()
    return short(said[-1], 160) if said else f"{short(command)} ended with {process.returncode}"


def _imported(text: str) -> Condition:
    module, _, name = text.partition(":")
    sys.path.insert(0, os.getcwd())  # where tasks are found, too
    try:
        found = getattr(importlib.import_module(module), name)
    except Exception as error:  # the module is a stranger's code
        raise UsageError(f"--when {text}: {type(error).__name__}: {error}") from error
    finally:
        sys.path.remove(os.getcwd())
    if not callable(found):
        raise UsageError(f"--when {text} is {type(found).__name__}, not a function")

    def ask() -> str:
        answer = found()
        return "" if answer is True else (answer if isinstance(answer, str) and answer else f"{text} says no")

    return ask
