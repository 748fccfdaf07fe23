"""The program, with a client that waits for nothing between its tries: days of a server's absence in seconds.

python hasty.py client …
"""

from __future__ import annotations

import itertools

from fairfleet.client import link
from fairfleet.common.cli import main

link.CALL_SECONDS = 0.01
link.pauses = lambda: itertools.repeat(0.001)  # type: ignore[assignment, return-value]

if __name__ == "__main__":
    main()
