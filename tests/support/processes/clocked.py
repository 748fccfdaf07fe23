"""`fairfleet` with a wall clock that tests move: a jump, as of a device without a battery.

The file that FAIRFLEET_TEST_CLOCK names holds the seconds by which the wall clock is wrong; it is
read at every look at the clock. The monotonic clock is not touched.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

VARIABLE = "FAIRFLEET_TEST_CLOCK"
_true_time = time.time


def moved_time() -> float:
    """Return the wall clock's time, wrong by what the file says."""
    return _true_time() + float(Path(os.environ[VARIABLE]).read_text() or 0)


if __name__ == "__main__":
    time.time = moved_time
    from fairfleet.common.cli.main import main

    main()
