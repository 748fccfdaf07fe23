"""How long a client waits between its tries."""

from __future__ import annotations

from itertools import islice

from fairfleet.client.link import (
    FIRST_PAUSE_SECONDS,
    LONGEST_PAUSE_SECONDS,
    PATIENT_PAUSE_SECONDS,
    TRIES_BEFORE_PATIENCE,
    pauses,
)


def test_a_short_absence_costs_seconds_and_a_long_one_neither_battery_nor_radio() -> None:
    many = [list(islice(pauses(), TRIES_BEFORE_PATIENCE + 100)) for _ in range(50)]
    for taken in many:
        assert taken[0] <= FIRST_PAUSE_SECONDS
        assert max(taken[:TRIES_BEFORE_PATIENCE]) <= LONGEST_PAUSE_SECONDS
        assert LONGEST_PAUSE_SECONDS < max(taken[TRIES_BEFORE_PATIENCE:]) <= PATIENT_PAUSE_SECONDS
    assert len({taken[-1] for taken in many}) == len(many)  # not all at once
