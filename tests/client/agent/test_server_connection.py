"""How long a client waits between its tries."""

from __future__ import annotations

from itertools import islice

from fairfleet.client.agent.pauses import (
    FIRST_PAUSE_SECONDS,
    LONGEST_PAUSE_SECONDS,
    PATIENT_PAUSE_SECONDS,
    TRIES_BEFORE_PATIENCE,
    pauses,
)


def test_pauses_are_seconds_for_a_short_absence_and_a_minute_for_a_long_one() -> None:
    runs = [list(islice(pauses(), TRIES_BEFORE_PATIENCE + 100)) for _ in range(50)]
    for seconds in runs:
        assert seconds[0] <= FIRST_PAUSE_SECONDS
        assert max(seconds[:TRIES_BEFORE_PATIENCE]) <= LONGEST_PAUSE_SECONDS
        later = max(seconds[TRIES_BEFORE_PATIENCE:])
        assert LONGEST_PAUSE_SECONDS < later <= PATIENT_PAUSE_SECONDS
    assert len({seconds[-1] for seconds in runs}) == len(runs)  # clients do not return all at once
