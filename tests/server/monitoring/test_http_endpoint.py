"""The HTTP endpoint: pages, streams, and the limits on callers."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import struct
import threading
import time
from collections.abc import AsyncGenerator
from http import HTTPStatus
from http.client import HTTPConnection
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest

from fairfleet.common.errors import UsageError
from fairfleet.server.monitoring import http_endpoint
from fairfleet.server.monitoring.http_endpoint import (
    HttpEndpoint,
    HttpLimits,
    Page,
    Request,
    Stream,
)
from fairfleet.server.security.rate_limits import Refusals
from tests.support.fleet import until
from tests.support.scraping import get


async def echo(request: Request) -> Page:
    path = request.path
    if path == "/hang":
        time.sleep(1.0)  # noqa: ASYNC251  # the event loop hangs on purpose
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


def test_a_query_that_may_contain_a_token_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        asyncio.run(ask("/page?token=very-secret-token"))
    assert "/page" in caplog.text
    assert "very-secret-token" not in caplog.text


def test_the_endpoint_listens_on_ipv6() -> None:
    assert asyncio.run(ask("/metrics", "::1")) == (200, "/metrics")


def test_a_blocked_event_loop_is_answered_with_unavailable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http_endpoint, "LOOP_SECONDS", 0.1)
    assert asyncio.run(ask("/hang"))[0] == 503


def test_a_page_that_fails_is_an_internal_error() -> None:
    assert asyncio.run(ask("/fail"))[0] == 500


def test_nothing_listens_after_the_stop() -> None:
    async def stopped() -> str:
        endpoint = HttpEndpoint("127.0.0.1", 0, echo)
        endpoint.start()
        await endpoint.stop()
        return endpoint.url

    with pytest.raises(OSError, match="refused"):
        get(asyncio.run(stopped()))


def test_an_address_of_another_machine_is_a_user_error() -> None:
    async def listen() -> None:
        HttpEndpoint("192.0.2.1", 0, echo)

    with pytest.raises(UsageError, match=r"192\.0\.2\.1"):
        asyncio.run(listen())


def test_a_caller_that_hangs_up_leaves_no_traceback(capfd: pytest.CaptureFixture[str]) -> None:
    async def large(path: str, accept: str) -> Page:
        return Page(HTTPStatus.OK, bytes(20_000_000))

    async def hung_up_on() -> None:
        endpoint = HttpEndpoint("127.0.0.1", 0, large)
        endpoint.start()
        await asyncio.to_thread(hang_up, endpoint.url)
        await asyncio.to_thread(until, lambda: not handlers(), "the handler to end")
        await endpoint.stop()

    asyncio.run(hung_up_on())
    assert "Traceback" not in capfd.readouterr().err


def test_a_connection_that_outlives_the_event_loop_learns_that_it_stopped(
    capfd: pytest.CaptureFixture[str],
) -> None:
    async def connected() -> HTTPConnection:
        endpoint = HttpEndpoint("127.0.0.1", 0, echo)
        endpoint.start()
        connection = HTTPConnection(endpoint.url.removeprefix("http://"), timeout=10)
        assert await asyncio.to_thread(ask_over, connection) == 200
        await endpoint.stop()
        return connection

    with contextlib.closing(asyncio.run(connected())) as connection:
        assert ask_over(connection) == 503
    assert "Traceback" not in capfd.readouterr().err


def test_no_name_is_resolved_before_the_server_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    """A DNS server that does not answer would block the whole server."""

    def look_up(name: str = "") -> str:
        raise AssertionError(f"looked up {name!r}")

    monkeypatch.setattr(socket, "getfqdn", look_up)
    assert asyncio.run(ask("/metrics")) == (200, "/metrics")


def hang_up(url: str) -> None:
    """Reset a connection after the first bytes of the answer."""
    with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2]))) as connection:
        connection.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
        assert connection.recv(10)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def handlers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if "process_request_thread" in thread.name]


def ask_over(connection: HTTPConnection) -> int:
    connection.request("GET", "/metrics")
    with connection.getresponse() as answer:
        answer.read()
        return answer.status


async def counted(stop_at: int, closed: asyncio.Event) -> AsyncGenerator[bytes]:
    try:
        for number in range(stop_at):
            yield f"data: {number}\n\n".encode()
            await asyncio.sleep(0.01)
    finally:
        closed.set()


def test_a_stream_is_sent_message_by_message_until_it_ends() -> None:
    async def read() -> tuple[int, str]:
        async def pages(request: Request) -> Stream:
            return Stream(counted(3, asyncio.Event()))

        endpoint = HttpEndpoint("127.0.0.1", 0, pages)
        endpoint.start()
        try:
            return await asyncio.to_thread(get, endpoint.url)
        finally:
            await endpoint.stop()

    assert asyncio.run(read()) == (200, "data: 0\n\ndata: 1\n\ndata: 2\n\n")


def test_a_viewer_that_disconnects_ends_its_stream_and_frees_its_slot() -> None:
    async def watch() -> tuple[int, int]:
        closed = asyncio.Event()

        async def pages(request: Request) -> Stream:
            return Stream(counted(1_000_000, closed))

        endpoint = HttpEndpoint("127.0.0.1", 0, pages, HttpLimits(viewers=1))
        endpoint.start()
        try:
            host, port = endpoint.url.removeprefix("http://").split(":")
            viewer = await asyncio.to_thread(socket.create_connection, (host, int(port)))
            viewer.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            await asyncio.to_thread(viewer.recv, 100)
            second, _ = await asyncio.to_thread(get, endpoint.url)
            closed.clear()
            viewer.close()
            await asyncio.wait_for(closed.wait(), 30)
            third = await asyncio.to_thread(status_soon, endpoint.url)
            return second, third
        finally:
            await endpoint.stop()

    assert asyncio.run(watch()) == (503, 200)


def status_soon(url: str) -> int:
    """Return the status of an answer, once a slot for a viewer is free."""

    def ask() -> int | None:
        with contextlib.suppress(HTTPError), urlopen(url, timeout=10) as answer:
            return int(answer.status)
        return None

    status: int = until(ask, "a place for another viewer")
    return status


# ---- limits --------------------------------------------------------------------------------------


async def call(limits: HttpLimits, *beginnings: bytes) -> tuple[list[bytes], dict[str, int]]:
    """Return the answers to callers that send these bytes at the same time, and the refusals."""
    refusals = Refusals()
    endpoint = HttpEndpoint("127.0.0.1", 0, echo, limits, refusals)
    endpoint.start()
    host, port = endpoint.url.removeprefix("http://").split(":")

    def answers() -> list[bytes]:
        with contextlib.ExitStack() as stack:
            callers = [
                stack.enter_context(socket.create_connection((host, int(port)), 30))
                for _ in beginnings
            ]
            for caller, beginning in zip(callers, beginnings, strict=True):
                with contextlib.suppress(OSError):  # a refused caller may be disconnected already
                    caller.sendall(beginning)
            return [everything(caller) for caller in callers]

    try:
        return await asyncio.to_thread(answers), refusals.counts()
    finally:
        await endpoint.stop()


def everything(caller: socket.socket) -> bytes:
    """Return all bytes until the server closes the connection."""
    text = b""
    with contextlib.suppress(ConnectionError):
        while more := caller.recv(1000):
            text += more
    return text


def test_a_request_that_never_ends_is_disconnected() -> None:
    answers, counted = asyncio.run(call(HttpLimits(seconds=0.2), b"GET / HTTP/1.1\r\nX: "))
    assert (answers, counted["http_slow"]) == ([b""], 1)


def test_a_connection_that_says_nothing_is_ended_but_no_offence() -> None:
    answers, counted = asyncio.run(call(HttpLimits(seconds=0.2), b""))
    assert (answers, counted["http_slow"]) == ([b""], 0)


@pytest.mark.parametrize(
    "begin", [b"GET /" + b"a" * 300, b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 120]
)
def test_a_request_that_is_too_large_gets_that_status(begin: bytes) -> None:
    answers, counted = asyncio.run(call(HttpLimits(header_bytes=256), begin[:256]))
    assert b" 431 " in answers[0]
    assert counted["http_headers"] == 1


def test_callers_beyond_the_limit_are_refused() -> None:
    answers, counted = asyncio.run(call(HttpLimits(connections=2, seconds=0.5), *[b""] * 5))
    assert sum(b" 503 " in answer for answer in answers) == 3
    assert counted["http_connections"] == 3


def test_a_body_is_not_parsed_as_a_request() -> None:
    begin = b"GET /a HTTP/1.1\r\nContent-Length: 20\r\n\r\nGET /b HTTP/1.1\r\n\r\n"
    answers, _ = asyncio.run(call(HttpLimits(), begin))
    assert answers[0].count(b"HTTP/1.1 200") == 1
