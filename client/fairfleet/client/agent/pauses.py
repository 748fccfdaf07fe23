"""How long a client waits for an answer, and between two tries of a call."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

CALL_SECONDS = 15.0  # for calls that the server answers at once
FIRST_PAUSE_SECONDS = 0.2
LONGEST_PAUSE_SECONDS = 2.0  # all clients are back within seconds of a server's restart
TRIES_BEFORE_PATIENCE = 40  # ten minutes or more, since each waits for a connection
PATIENT_PAUSE_SECONDS = 60.0  # an absence of days: radio and battery matter more than seconds


def pauses() -> Iterator[float]:
    """Yield pauses in seconds: exponential backoff with full jitter.

    The jitter keeps a thousand clients from returning at the same moment.
    """
    longest = FIRST_PAUSE_SECONDS
    for tries in itertools.count():
        yield random.uniform(0.05, longest)  # not a secret
        longest = min(
            2 * longest,
            PATIENT_PAUSE_SECONDS if tries >= TRIES_BEFORE_PATIENCE else LONGEST_PAUSE_SECONDS,
        )
