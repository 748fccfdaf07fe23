"""Process priority: training gives way to everything else that runs on the machine."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def give_way(niceness: int) -> None:
    """Lower the priority of this process and all its threads to at least this niceness.

    Threads that start later inherit it. A process that was started with a lower priority keeps it.
    """
    if not hasattr(os, "setpriority"):
        return  # Windows has no such call.
    for thread in _thread_ids():
        with suppress(ProcessLookupError):  # the thread has ended
            if os.getpriority(os.PRIO_PROCESS, thread) < niceness:
                os.setpriority(os.PRIO_PROCESS, thread, niceness)


def _thread_ids() -> list[int]:
    """Return all threads on Linux, where each has its own priority; elsewhere the process."""
    folder = Path("/proc/self/task")
    return [int(entry.name) for entry in folder.iterdir()] if folder.is_dir() else [0]
