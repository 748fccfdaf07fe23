"""The limits of one server on joins, uploads and wrong tokens."""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest

from fairfleet.common.errors import LimitReached, TooSlow
from fairfleet.server.security.limits import ServerLimits
from fairfleet.server.security.request_limits import (
    MOST_ADDRESSES,
    RequestLimits,
    WrongTokenLimiter,
    address_of,
)


def test_a_client_may_reconnect_every_second_but_not_in_a_burst() -> None:
    limits = RequestLimits(ServerLimits())
    for second in range(600):
        limits.joins.take("honest", float(second))
    for _ in range(10):
        limits.joins.take("restless", 0.0)
    with pytest.raises(LimitReached) as caught:
        limits.joins.take("restless", 0.15)
    assert caught.value.retry_seconds == pytest.approx(0.35)
    limits.joins.take("restless", 0.5)


def test_an_upload_beyond_the_limit_waits_for_a_slot() -> None:
    async def run_uploads() -> list[str]:
        limits, seen = RequestLimits(ServerLimits(uploads=1)), list[str]()

        async def send(client: str) -> None:
            async with limits.upload(client):
                seen.append(f"{client} begins")
                await asyncio.sleep(0)
                seen.append(f"{client} ends")

        await asyncio.gather(send("a"), send("b"))
        return seen

    assert asyncio.run(run_uploads()) == ["a begins", "a ends", "b begins", "b ends"]


@pytest.mark.parametrize("pause", [10.0, 0.02])
def test_a_silent_or_trickling_stream_is_ended(pause: float) -> None:
    async def trickle() -> AsyncIterator[bytes]:
        while True:
            await asyncio.sleep(pause)
            yield b"."

    async def read() -> None:
        async for _ in RequestLimits(ServerLimits(idle_seconds=0.1)).paced(trickle(), 100):
            pass

    with pytest.raises(TooSlow, match=r"within 0\.1 s"):
        asyncio.run(read())


@pytest.mark.parametrize(
    ("clients", "small", "large"), [(0, 4, 2), (10, 4, 2), (30, 2, 2), (300, 1, 1)]
)
def test_each_upload_gathers_fewer_chunks_when_more_clients_send(
    clients: int, small: int, large: int
) -> None:
    limits = RequestLimits(ServerLimits(uploads=1000))

    async def batches() -> tuple[int, int]:
        async with AsyncExitStack() as stack:
            for number in range(clients):
                await stack.enter_async_context(limits.upload(f"client-{number}"))
            return limits.batch(4 << 20), limits.batch(1 << 30)

    assert asyncio.run(batches()) == (small, large)
    assert limits.batch(4 << 20) == 4  # no upload is left


def test_wrong_tokens_are_limited_by_address_and_in_total() -> None:
    limiter = WrongTokenLimiter(per_minute=2, in_all=5)
    for _ in range(2):
        limiter.sent_wrong_token("ipv4:192.0.2.1:1000", 0.0)
    for port in range(50):  # another port is the same peer
        with pytest.raises(
            LimitReached, match=r"192\.0\.2\.1 sent wrong tokens more than 2 times a minute"
        ):
            limiter.sent_wrong_token(f"ipv4:192.0.2.1:{port}", 0.0)
    for host in range(2, 5):  # a refused token does not count towards the total
        limiter.sent_wrong_token(f"ipv4:192.0.2.{host}:1", 0.0)
    with pytest.raises(LimitReached, match="all addresses together") as caught:
        limiter.sent_wrong_token("ipv4:192.0.2.9:1", 0.0)
    assert (caught.value.reason, caught.value.retry_seconds) == ("enrolments", 12.0)


def test_an_ipv6_network_counts_as_one_address_and_memory_is_bounded() -> None:
    limiter = WrongTokenLimiter(per_minute=1, in_all=10**9)
    limiter.sent_wrong_token("ipv6:%5B2001:db8:1:2::7%5D:443", 0.0)
    with pytest.raises(LimitReached):
        limiter.sent_wrong_token("ipv6:%5B2001:db8:1:2:ffff::9%5D:443", 0.0)
    limiter.sent_wrong_token("ipv4:192.0.2.1:1", 0.0)
    with pytest.raises(LimitReached):
        limiter.sent_wrong_token("ipv6:%5B::ffff:192.0.2.1%5D:9", 0.0)
    for number in range(3 * MOST_ADDRESSES):
        limiter.sent_wrong_token(f"ipv6:[{ipaddress.IPv6Address(number << 64)}]:1", 0.0)
    assert len(limiter._by_address) == MOST_ADDRESSES
    for malformed in (
        "",
        ":",
        "unix:",
        "ipv4:",
        "ipv4:::::",
        "ipv6:%5B%5D:1",
        "ipv6:[fe80::1%25eth0]:7",
        "x" * 9999,
    ):
        assert len(address_of(malformed)) < 50
