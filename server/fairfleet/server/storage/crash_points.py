"""Crash points: where tests kill the server, after durable writes and before acknowledgements.

`passed` is called at each point. In a test, an environment variable selects the point at which
the process kills itself: by its number since the start of the process, or by a regular expression
for its name. Without the variable nothing happens.
"""

from __future__ import annotations

import os
import re
import signal
import sys

VARIABLE = "FAIRFLEET_TEST_DIE_AT"

_passed = 0


def passed(point: str) -> None:
    """Kill this process if the environment selects this point."""
    global _passed
    where = os.environ.get(VARIABLE)
    if not where:
        return
    _passed += 1
    if where == str(_passed) or re.match(where, point):
        print(f"dying on purpose after: {point}", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
