"""Where tests make the server die: after every durable write, and before every acknowledgement.

`passed` is called at each such point. In a test the environment says at which of them the process is to kill itself,
as a failing machine would: a number counts them from the start of the process, a regular expression names one.
Elsewhere it does nothing.
"""

from __future__ import annotations

import os
import re
import signal
import sys

VARIABLE = "FAIRFLEET_TEST_DIE_AT"

_where = os.environ.get(VARIABLE, "")
_passed = 0


def passed(point: str) -> None:
    global _passed
    if not _where:
        return
    _passed += 1
    if _where == str(_passed) or re.match(_where, point):
        print(f"dying on purpose after: {point}", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
