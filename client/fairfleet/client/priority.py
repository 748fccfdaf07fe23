"""Training is not what a machine is there for: it gives way to whatever else runs there."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def give_way(niceness: int) -> None:
    """Of this process and all its threads; those that begin later inherit it. Never less than it was started with."""
    if not hasattr(os, "setpriority"):
        return  # Windows has no such thing
    for thread in _threads():
        with suppress(ProcessLookupError):  # it has ended
            if os.getpriority(os.PRIO_PROCESS, thread) < niceness:
                os.setpriority(os.PRIO_PROCESS, thread, niceness)


def _threads() -> list[int]:
    """On Linux each has a priority of its own; elsewhere the process has one."""
    listed = Path("/proc/self/task")
    return [int(one.name) for one in listed.iterdir()] if listed.is_dir() else [0]
