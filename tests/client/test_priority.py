"""A client gives way to what else its machine does, with all its threads, and never takes back what it was given."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROBE = """
import os, threading
import numpy  # whose threads are there before
from fairfleet.client.priority import give_way

give_way({niceness})
began = threading.Event()
later = threading.Thread(target=began.wait)
later.start()
print(sorted({{os.getpriority(os.PRIO_PROCESS, int(thread)) for thread in os.listdir("/proc/self/task")}}))
began.set()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="threads have priorities of their own only on Linux")
@pytest.mark.parametrize(
    ("started_with", "niceness", "then"),
    [
        pytest.param(0, 10, 10, id="gives way"),
        pytest.param(0, 0, 0, id="not asked to"),
        pytest.param(15, 10, 15, id="started with more"),
    ],
)
def test_all_threads_give_way_as_far_as_asked_or_as_they_were_started(
    started_with: int, niceness: int, then: int
) -> None:
    code = [sys.executable, "-c", PROBE.format(niceness=niceness)]
    ran = subprocess.run(["nice", "-n", str(started_with), *code], capture_output=True, text=True, check=True)
    assert ran.stdout == f"[{then}]\n"
