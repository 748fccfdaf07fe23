"""How long a client waits between its tries, and what it says of a changed federation."""

from __future__ import annotations

from itertools import islice

from fairfleet.client.agent.call_errors import FederationChanged
from fairfleet.client.agent.pauses import (
    FIRST_PAUSE_SECONDS,
    LONGEST_PAUSE_SECONDS,
    PATIENT_PAUSE_SECONDS,
    TRIES_BEFORE_PATIENCE,
    pauses,
)
from fairfleet.proto.v1 import fleet_pb2 as pb


def test_pauses_are_seconds_for_a_short_absence_and_a_minute_for_a_long_one() -> None:
    runs = [list(islice(pauses(), TRIES_BEFORE_PATIENCE + 100)) for _ in range(50)]
    for seconds in runs:
        assert seconds[0] <= FIRST_PAUSE_SECONDS
        assert max(seconds[:TRIES_BEFORE_PATIENCE]) <= LONGEST_PAUSE_SECONDS
        later = max(seconds[TRIES_BEFORE_PATIENCE:])
        assert LONGEST_PAUSE_SECONDS < later <= PATIENT_PAUSE_SECONDS
    assert len({seconds[-1] for seconds in runs}) == len(runs)  # clients do not return all at once


def test_a_server_cannot_fill_the_log_by_the_name_of_its_federation() -> None:
    hostile = pb.JoinResponse(federation="birds\n" * 10_000, federation_id="\x1b[2J" * 10_000)
    text = str(FederationChanged("here:1", pb.JoinResponse(federation="birds"), hostile))
    assert len(text) < 400
    assert text.isprintable()
    assert "had birds (no id) before" in text
