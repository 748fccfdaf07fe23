"""Token buckets, places and names: pure, so that a minute takes no time."""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairfleet.common.errors import BadRequest, LimitReached, TooSlow, short
from fairfleet.common.stream import split
from fairfleet.common.wire import evaluation_in, report_in, signature_in
from fairfleet.proto.v1 import fleet_pb2 as pb
from fairfleet.proto.v1.model_pb2 import Signature, TensorSpec
from fairfleet.server.connection_limits import connection_limits
from fairfleet.server.gate import Gate
from fairfleet.server.limits import REASONS, Bucket, Buckets, Calls, KnownClients, Places, Refusals
from fairfleet.server.settings import Limits
from fairfleet.server.strangers import MOST_ADDRESSES, Strangers, address_of


@given(st.lists(st.floats(0, 30), max_size=300), st.integers(1, 120))
def test_never_more_than_twice_a_minutes_worth_in_a_minute(pauses: list[float], per_minute: int) -> None:
    """A full bucket, and what comes back meanwhile."""
    bucket, now, taken = Bucket(per_minute, per_minute, 0.0), 0.0, list[float]()
    for pause in pauses:
        now += pause
        if not bucket.take(now):
            taken.append(now)
    for began in taken:
        assert sum(began <= at < began + 60 for at in taken) <= 2 * per_minute


@given(st.integers(1, 1000), st.integers(0, 50))
def test_who_waits_as_long_as_it_is_told_is_let_in(per_minute: int, more: int) -> None:
    bucket, now = Bucket(per_minute, 0.0, 0.0), 0.0
    for _ in range(more + 1):
        now += bucket.take(now) + 1e-6
        assert bucket.take(now) == 0.0


def test_a_clock_that_is_set_back_gives_nothing_away() -> None:
    bucket = Bucket(1, 1.0, 100.0)
    assert bucket.take(100.0) == 0.0
    assert bucket.take(50.0) == 60.0


def test_buckets_are_by_client_and_the_oldest_are_forgotten() -> None:
    buckets = Buckets(1, most=2, reason="joins", what="joined")
    buckets.take("a", 0.0)
    with pytest.raises(LimitReached, match="client a joined more than 1 times a minute") as caught:
        buckets.take("a", 0.0)
    assert (caught.value.reason, caught.value.retry_seconds) == ("joins", 60.0)
    for client in "bcdefgh":
        buckets.take(client, 0.0)
    assert len(buckets) == 2


def test_a_call_that_is_given_back_did_not_count() -> None:
    """Rounds of any shortness: a client that gets a new task at every poll is never held up."""
    buckets = Buckets(2, most=10, reason="polls", what="polled")
    for _ in range(1000):
        buckets.take("fast", 0.0)
        buckets.give_back("fast")
    buckets.give_back("stranger")


def test_places_are_by_client_and_free_when_they_are_given_back() -> None:
    places = Places(1, "uploads", "uploads")
    with places.taken("a"), places.taken("b"), pytest.raises(LimitReached, match="has 1 uploads under way") as caught:
        places.take("a")
    assert caught.value.retry_seconds == 1.0
    with places.taken("a"):
        pass
    assert not places._taken, "nothing is kept of those who are gone"


def test_calls_beyond_the_limit_are_asked_to_come_back() -> None:
    calls = Calls(1)
    with calls.under_way(), pytest.raises(LimitReached) as caught, calls.under_way():
        pass
    assert caught.value.retry_seconds == 1.0
    with calls.under_way():
        pass


def test_known_names_stay_welcome_when_there_is_room_for_no_other() -> None:
    known = KnownClients(2)
    known.recall(["a", "b", "c"])
    known.add("a")
    with pytest.raises(LimitReached, match="3 clients are known") as caught:
        known.add("d")
    assert caught.value.retry_seconds is None, "waiting would not help"


def test_what_is_counted_has_few_names() -> None:
    refusals = Refusals()
    refusals.add("joins")
    refusals.add("whatever a later version may say")
    assert refusals.counts().keys() == set(REASONS)
    assert (refusals.counts()["joins"], refusals.counts()["other"]) == (1, 1)


def test_others_wait_for_a_place_among_those_who_upload() -> None:
    async def order() -> list[str]:
        gate, seen = Gate(Limits(uploads=1)), list[str]()

        async def send(client: str) -> None:
            async with gate.upload(client):
                seen.append(f"{client} begins")
                await asyncio.sleep(0)
                seen.append(f"{client} ends")

        await asyncio.gather(send("a"), send("b"))
        return seen

    assert asyncio.run(order()) == ["a begins", "a ends", "b begins", "b ends"]


@pytest.mark.parametrize("pause", [10.0, 0.02])
def test_a_stream_that_is_silent_or_trickles_is_ended(pause: float) -> None:
    async def trickle() -> AsyncIterator[bytes]:
        while True:
            await asyncio.sleep(pause)
            yield b"."

    async def read() -> None:
        async for _ in Gate(Limits(idle_seconds=0.1)).paced(trickle(), 100):
            pass

    with pytest.raises(TooSlow, match=r"within 0\.1 s"):
        asyncio.run(read())


def test_grpc_unpacks_nothing_by_itself() -> None:
    told = dict(connection_limits(Limits()))
    assert (told["grpc.per_message_decompression"], told["grpc.compression_enabled_algorithms_bitset"]) == (0, 1)


# ---- what attacks and fuzzing led to ---------------------------------------------------------------


def test_a_long_value_is_quoted_in_short() -> None:
    assert short("a\n" * 10) == "a?" * 10
    assert short("é" * 100, 3) == "ééé… (100 characters)"


def test_a_mistake_in_a_report_is_not_sent_back_whole() -> None:
    with pytest.raises(BadRequest) as caught:
        report_in(pb.TrainReport(cut_by=["x" * 100_000] * 100))
    assert len(str(caught.value)) < 1000
    with pytest.raises(BadRequest, match="accuracy"):
        evaluation_in(pb.Evaluation(samples=1, loss=1.0, accuracy=2.0))


def test_a_signature_with_more_dimensions_than_any_array_has() -> None:
    with pytest.raises(BadRequest, match="65 dimensions; at most 64"):
        signature_in(Signature(tensors=[TensorSpec(name="w", shape=[1] * 65, dtype="float32", section=1)]))


def test_a_chunk_of_nothing_but_fields_is_not_read_to_its_end() -> None:
    with pytest.raises(BadRequest, match="more than 64 fields"):
        split(b"\x38\x01" * 65)
    split(b"\x38\x01" * 64)


@pytest.mark.parametrize(("clients", "small", "large"), [(0, 4, 2), (10, 4, 2), (30, 2, 2), (300, 1, 1)])
def test_the_more_clients_send_the_fewer_chunks_each_may_gather(clients: int, small: int, large: int) -> None:
    gate = Gate(Limits(uploads=1000))

    async def batches() -> tuple[int, int]:
        async with AsyncExitStack() as stack:
            for number in range(clients):
                await stack.enter_async_context(gate.upload(f"client-{number}"))
            return gate.batch(4 << 20), gate.batch(1 << 30)

    assert asyncio.run(batches()) == (small, large)
    assert gate.batch(4 << 20) == 4  # nobody sends any more


def test_wrong_tokens_are_limited_by_address_and_in_all() -> None:
    strangers = Strangers(per_minute=2, in_all=5)
    for _ in range(2):
        strangers.sent_wrong_token("ipv4:192.0.2.1:1000", 0.0)
    for port in range(50):  # another port is the same stranger
        with pytest.raises(LimitReached, match=r"192\.0\.2\.1 sent wrong tokens more than 2 times a minute"):
            strangers.sent_wrong_token(f"ipv4:192.0.2.1:{port}", 0.0)
    for host in range(2, 5):  # who was refused took nothing from the others
        strangers.sent_wrong_token(f"ipv4:192.0.2.{host}:1", 0.0)
    with pytest.raises(LimitReached, match="strangers from everywhere") as caught:
        strangers.sent_wrong_token("ipv4:192.0.2.9:1", 0.0)
    assert (caught.value.reason, caught.value.retry_seconds) == ("enrolments", 12.0)


def test_a_household_of_ipv6_addresses_is_one_stranger_and_memory_has_an_end() -> None:
    strangers = Strangers(per_minute=1, in_all=10**9)
    strangers.sent_wrong_token("ipv6:%5B2001:db8:1:2::7%5D:443", 0.0)
    with pytest.raises(LimitReached):
        strangers.sent_wrong_token("ipv6:%5B2001:db8:1:2:ffff::9%5D:443", 0.0)
    strangers.sent_wrong_token("ipv4:192.0.2.1:1", 0.0)
    with pytest.raises(LimitReached):
        strangers.sent_wrong_token("ipv6:%5B::ffff:192.0.2.1%5D:9", 0.0)
    for number in range(3 * MOST_ADDRESSES):
        strangers.sent_wrong_token(f"ipv6:[{ipaddress.IPv6Address(number << 64)}]:1", 0.0)
    assert len(strangers._each) == MOST_ADDRESSES
    for odd in ("", ":", "unix:", "ipv4:", "ipv4:::::", "ipv6:%5B%5D:1", "ipv6:[fe80::1%25eth0]:7", "x" * 9999):
        assert len(address_of(odd)) < 50
