"""Sets the limits of the server process: how it returns memory, and how many files it opens."""

from __future__ import annotations

import ctypes
import resource
import sys

# Parameters of mallopt(3). The defaults of glibc suit many small objects, not chunks of 1 MiB. With
# one arena per thread, chunks that one thread frees are not available to the others. The threshold
# above which memory is returned at once would rise by itself, and freed models would stay with the
# process.
_SETTINGS = {-8: 1, -3: 4 << 20, -1: 16 << 20}  # M_ARENA_MAX, M_MMAP_THRESHOLD, M_TRIM_THRESHOLD


def keep_compact() -> None:
    """Make the allocator return freed memory; call it before any thread starts.

    Has no effect with a C library other than glibc.
    """
    if sys.platform != "linux":
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for parameter, value in _SETTINGS.items():
            mallopt(parameter, value)


def allow_many_connections() -> None:
    """Raise the limit of open files to the largest allowed one.

    Each client is an open file, and the default limit is often 1024.
    """
    _, limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
