"""Where tests make the server die: after every durable write, and before every acknowledgement.

`passed` is called at each such point. In a test the environment says at which of them, counted from the start of
the process, the process is to kill itself, as a failing machine would; elsewhere it does nothing.
"""

from __future__ import annotations

import os
import signal
import sys

VARIABLE = "FAIRFLEET_TEST_DIE_AT"

_left = int(os.environ.get(VARIABLE, "0"))


def passed(point: str) -> None:
    global _left
    if _left:
        _left -= 1
        if _left == 0:
            print(f"dying on purpose after: {point}", file=sys.stderr, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
