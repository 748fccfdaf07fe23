from __future__ import annotations

import asyncio
import time
from http import HTTPStatus

import pytest

from fairfleet.common.errors import UsageError
from fairfleet.server import http_endpoint
from fairfleet.server.http_endpoint import HttpEndpoint, Page
from tests.e2e.scraping import get


async def echo(path: str, accept: str) -> Page:
    if path == "/hang":
        time.sleep(1.0)  # noqa: ASYNC251  # the loop hangs: that is the point
    if path == "/fail":
        raise RuntimeError("this page always fails")
    return Page(HTTPStatus.OK, path.encode())


async def ask(path: str, host: str = "127.0.0.1") -> tuple[int, str]:
    endpoint = HttpEndpoint(host, 0, echo)
    endpoint.start()
    try:
        return await asyncio.to_thread(get, endpoint.url + path)
    finally:
        await endpoint.stop()


def test_a_page_is_found_by_its_path_without_the_query() -> None:
    assert asyncio.run(ask("/metrics?name=x")) == (200, "/metrics")


def test_it_listens_on_ipv6_too() -> None:
    assert asyncio.run(ask("/metrics", "::1")) == (200, "/metrics")


def test_an_event_loop_that_is_stuck_is_told_of_as_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_endpoint, "LOOP_SECONDS", 0.1)
    assert asyncio.run(ask("/hang"))[0] == 503


def test_a_page_that_fails_is_our_fault_and_told_so() -> None:
    assert asyncio.run(ask("/fail"))[0] == 500


def test_nothing_listens_after_the_stop() -> None:
    async def stopped() -> str:
        endpoint = HttpEndpoint("127.0.0.1", 0, echo)
        endpoint.start()
        await endpoint.stop()
        return endpoint.url

    with pytest.raises(OSError, match="refused"):
        get(asyncio.run(stopped()))


def test_an_address_that_is_not_this_machines_is_the_users_mistake() -> None:
    async def listen() -> None:
        HttpEndpoint("192.0.2.1", 0, echo)

    with pytest.raises(UsageError, match=r"192\.0\.2\.1"):
        asyncio.run(listen())
