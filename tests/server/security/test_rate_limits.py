"""Token buckets, places and known names. They are pure, so a minute takes no time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairfleet.common.chunk_stream import split
from fairfleet.common.errors import BadRequest, LimitReached, short
from fairfleet.common.wire import evaluation_in, report_in, signature_in
from fairfleet.proto.v1 import fleet_pb2 as pb
from fairfleet.proto.v1.model_pb2 import Signature, TensorSpec
from fairfleet.server.rpc.channel_options import connection_limits, enrolment_limits
from fairfleet.server.security.limits import ServerLimits
from fairfleet.server.security.rate_limits import (
    REASONS,
    Bucket,
    Buckets,
    Calls,
    KnownClients,
    Places,
    Refusals,
)


@given(st.lists(st.floats(0, 30), max_size=300), st.integers(1, 120))
def test_a_minute_allows_at_most_twice_the_rate(pauses: list[float], per_minute: int) -> None:
    """A minute allows a full bucket and what is refilled meanwhile."""
    bucket, now, accepted = Bucket(per_minute, per_minute, 0.0), 0.0, list[float]()
    for pause in pauses:
        now += pause
        if not bucket.take(now):
            accepted.append(now)
    for start in accepted:
        assert sum(start <= time < start + 60 for time in accepted) <= 2 * per_minute


@given(st.integers(1, 1000), st.integers(0, 50))
def test_a_peer_that_waits_as_long_as_requested_is_accepted(per_minute: int, more: int) -> None:
    bucket, now = Bucket(per_minute, 0.0, 0.0), 0.0
    for _ in range(more + 1):
        now += bucket.take(now) + 1e-6
        assert bucket.take(now) == 0.0


def test_a_burst_is_never_larger_than_a_minutes_worth() -> None:
    buckets = Buckets(2, most=10, reason="joins", what="joined", burst=5)
    for _ in range(2):
        buckets.take("a", 0.0)
    with pytest.raises(LimitReached, match="more than 2 times a minute, which"):
        buckets.take("a", 0.0)


def test_a_clock_that_is_set_back_refills_nothing() -> None:
    bucket = Bucket(1, 1.0, 100.0)
    assert bucket.take(100.0) == 0.0
    assert bucket.take(50.0) == 60.0


def test_buckets_are_by_client_and_the_longest_silent_are_forgotten() -> None:
    buckets = Buckets(1, most=2, reason="joins", what="joined")
    buckets.take("a", 0.0)
    with pytest.raises(LimitReached, match="client a joined more than 1 times a minute") as caught:
        buckets.take("a", 0.0)
    assert (caught.value.reason, caught.value.retry_seconds) == ("joins", 60.0)
    for client in "bcdefgh":
        buckets.take(client, 0.0)
    assert len(buckets) == 2


def test_a_returned_call_does_not_count() -> None:
    """A client that gets a new task at every poll is never delayed, however short rounds are."""
    buckets = Buckets(2, most=10, reason="polls", what="polled")
    for _ in range(1000):
        buckets.take("fast", 0.0)
        buckets.give_back("fast")
    buckets.give_back("unknown")


def test_slots_are_per_client_and_free_after_release() -> None:
    places = Places(1, "uploads", "uploads")
    with (
        places.taken("a"),
        places.taken("b"),
        pytest.raises(LimitReached, match="has 1 uploads under way") as caught,
    ):
        places.take("a")
    assert caught.value.retry_seconds == 1.0
    with places.taken("a"):
        pass
    assert not places._in_use, "clients without a place occupy no memory"


def test_calls_beyond_the_limit_are_refused_with_a_time_to_retry() -> None:
    calls = Calls(1)
    with calls.under_way(), pytest.raises(LimitReached) as caught, calls.under_way():
        pass
    assert caught.value.retry_seconds == 1.0
    with calls.under_way():
        pass


def test_known_names_are_accepted_after_the_limit_is_reached() -> None:
    names = KnownClients(2)
    names.recall(["a", "b", "c"])
    names.add("a")
    with pytest.raises(LimitReached, match="3 clients are known") as caught:
        names.add("d")
    assert caught.value.retry_seconds is None, "waiting would not help"


def test_unknown_reasons_of_refusals_count_as_other() -> None:
    refusals = Refusals()
    refusals.add("joins")
    refusals.add("whatever a later version may say")
    assert refusals.counts().keys() == set(REASONS)
    assert (refusals.counts()["joins"], refusals.counts()["other"]) == (1, 1)


def test_grpc_decompresses_nothing_by_itself() -> None:
    """A compressed message reaches the services as it was sent.

    tests/e2e/refusals/test_uploads.py checks that it is refused, and
    tests/attacks/test_oversized_messages.py that a compression bomb takes no memory.
    """
    for options in (connection_limits(ServerLimits()), enrolment_limits(ServerLimits())):
        assert dict(options)["grpc.per_message_decompression"] == 0


# ---- regressions of attacks and fuzzing ------------------------------------------------------


def test_a_long_value_is_shortened_for_messages() -> None:
    assert short("a\n" * 10) == "a?" * 10
    assert short("é" * 100, 3) == "ééé… (100 characters)"


def test_an_invalid_report_is_quoted_only_in_part() -> None:
    with pytest.raises(BadRequest) as caught:
        report_in(pb.TrainReport(cut_by=["x" * 100_000] * 100))
    assert len(str(caught.value)) < 1000
    with pytest.raises(BadRequest, match="accuracy"):
        evaluation_in(pb.Evaluation(samples=1, loss=1.0, accuracy=2.0))


def test_a_signature_with_too_many_dimensions_is_refused() -> None:
    with pytest.raises(BadRequest, match="65 dimensions; at most 64"):
        signature_in(
            Signature(tensors=[TensorSpec(name="w", shape=[1] * 65, dtype="float32", section=1)])
        )


def test_a_chunk_with_too_many_fields_is_refused() -> None:
    with pytest.raises(BadRequest, match="more than 64 fields"):
        split(b"\x38\x01" * 65)
    split(b"\x38\x01" * 64)
