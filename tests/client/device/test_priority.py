"""A client lowers the priority of all its threads, and never raises it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PROBE = """
import os, threading
import numpy  # its threads exist before
from fairfleet.client.device.priority import give_way

give_way({niceness})
began = threading.Event()
later = threading.Thread(target=began.wait)
later.start()
threads = os.listdir("/proc/self/task")
print(sorted({{os.getpriority(os.PRIO_PROCESS, int(thread)) for thread in threads}}))
began.set()
"""


@pytest.mark.skipif(
    sys.platform != "linux", reason="threads have priorities of their own only on Linux"
)
@pytest.mark.parametrize(
    ("lower_by", "niceness"),
    [
        pytest.param(0, 19, id="gives way"),
        pytest.param(0, 0, id="not requested"),
        pytest.param(15, 1, id="started with a lower priority"),
    ],
)
def test_all_threads_get_the_requested_niceness_or_keep_a_higher_one(
    lower_by: int, niceness: int
) -> None:
    """The tests themselves may run with a lowered priority."""
    code = [sys.executable, "-c", PROBE.format(niceness=niceness)]
    result = subprocess.run(
        ["nice", "-n", str(lower_by), *code], capture_output=True, text=True, check=True
    )
    started_with = min(os.nice(0) + lower_by, 19)
    assert result.stdout == f"[{max(started_with, niceness)}]\n"
