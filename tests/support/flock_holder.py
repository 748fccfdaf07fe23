"""Another process that holds a file lock as FairFleet did before it used the filelock library.

Versions up to 0.1.0 called fcntl.flock themselves. A state directory that one of them uses must
be seen as locked by this version, and be free as soon as that process dies.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

HOLD = """
import fcntl, os, sys, time
flags = os.O_RDONLY if os.path.isdir(sys.argv[1]) else os.O_RDWR | os.O_CREAT
descriptor = os.open(sys.argv[1], flags, 0o600)
fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
if sys.argv[2] == "writes-pid":
    os.ftruncate(descriptor, 0)
    os.write(descriptor, str(os.getpid()).encode())
print("locked", flush=True)
time.sleep(600)
"""


@contextmanager
def flock_held(path: Path, *, writes_pid: bool = False) -> Iterator[subprocess.Popen[str]]:
    """Provide a process that holds the flock of a file or folder; it is killed at the end."""
    mode = "writes-pid" if writes_pid else "silent"
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path), mode], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "locked\n"
        yield process
    finally:
        process.kill()
        process.wait(10)
