"""What the server's process asks of the machine: memory near what it uses, and a connection for every client."""

from __future__ import annotations

import ctypes
import resource
import sys

# Of mallopt(3): glibc's defaults suit many small objects, not chunks of a mebibyte. With one arena per thread, chunks
# freed in one are not there for the others; and the threshold above which memory is given back at once would rise by
# itself, until freed models stay with the process.
_SETTINGS = {-8: 1, -3: 4 << 20, -1: 16 << 20}  # M_ARENA_MAX, M_MMAP_THRESHOLD, M_TRIM_THRESHOLD


def keep_compact() -> None:
    """To be called before threads start. Does nothing where the C library is another."""
    if sys.platform != "linux":
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for parameter, value in _SETTINGS.items():
            mallopt(parameter, value)


def allow_many_connections() -> None:
    """Each client is an open file, and many systems allow a process 1024 of them unless it asks for more."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
