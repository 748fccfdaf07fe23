"""The HTTP endpoint with callers that are slow, many, large, or do not read."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
from collections.abc import Iterator

import pytest

from tests.support.attacks.siege import Siege, some_bytes
from tests.support.fleet import until
from tests.support.scraping import get

pytestmark = pytest.mark.slow  # tests/server/monitoring/test_http_endpoint.py has short ones

ASK = b"GET /healthz HTTP/1.1\r\nHost: x\r\n"


def caller(siege: Siege, begin: bytes) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", siege.http_port), timeout=30)
    with contextlib.suppress(OSError):  # the server may have closed the connection already
        connection.sendall(begin)
    return connection


def answer(connection: socket.socket) -> bytes:
    """Return all bytes until the server closes the connection."""
    text = b""
    with contextlib.suppress(ConnectionError):
        while more := connection.recv(65536):
            text += more
    return text


@contextlib.contextmanager
def callers(siege: Siege, count: int, begin: bytes) -> Iterator[list[socket.socket]]:
    connections = [caller(siege, begin) for _ in range(count)]
    try:
        yield connections
    finally:
        for connection in connections:
            connection.close()


def healthy(siege: Siege) -> bool:
    try:
        return get(f"http://127.0.0.1:{siege.http_port}/healthz")[0] == 200
    except OSError:
        return False


def test_headers_that_come_byte_by_byte_hold_no_thread_for_ever(siege: Siege) -> None:
    """Send a byte every tenth of a second, for longer than a request may take."""
    before = siege.refused("http_slow")
    ended = threading.Event()

    def trickle(connection: socket.socket) -> None:
        with contextlib.suppress(OSError):
            for _ in range(300):
                connection.sendall(b"x")
                if ended.wait(0.1):
                    return

    with siege.borne(), callers(siege, 8, ASK + b"X-Slow: ") as slow:
        threads = [
            threading.Thread(target=trickle, args=(slow_connection,)) for slow_connection in slow
        ]
        for thread in threads:
            thread.start()
        for slow_connection in slow:
            assert b"200" not in answer(slow_connection)
        ended.set()
        for thread in threads:
            thread.join()
    assert siege.refused("http_slow") == before + 8


def test_silent_callers_beyond_the_places_are_told_to_go(siege: Siege) -> None:
    with siege.borne(), callers(siege, 40, b"") as silent:
        answers = [answer(connection) for connection in silent]
        assert sum(b"503" in response for response in answers) >= 40 - 12
    until(lambda: healthy(siege), "a place at the endpoint")
    assert siege.refused("http_connections") >= 28


def test_requests_that_are_too_large(siege: Siege) -> None:
    with siege.borne():
        for begin in (
            b"GET /" + b"a" * 60_000 + b" HTTP/1.1\r\n\r\n",
            ASK + b"X-Large: " + b"a" * 100_000 + b"\r\n\r\n",
            ASK + b"".join(b"X-%d: y\r\n" % k for k in range(5000)) + b"\r\n",
        ):
            with contextlib.closing(caller(siege, begin)) as connection:
                response = answer(connection)
                assert (
                    b" 431 " in response or not response
                )  # a caller that is still sending may see only the end of the connection
    assert siege.refused("http_headers") == 3, "each of them"


def test_a_body_is_not_taken_for_the_next_request(siege: Siege) -> None:
    smuggled = b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n"
    begin = ASK + b"Content-Length: %d\r\n\r\n" % len(smuggled) + smuggled
    with siege.borne(), contextlib.closing(caller(siege, begin)) as connection:
        assert answer(connection).count(b"HTTP/1.1") == 1


def test_viewers_beyond_the_limit_and_viewers_that_do_not_read(siege: Siege) -> None:
    """The page's stream fills the socket buffer; a viewer that reads nothing is disconnected."""
    ask = b"GET /api/live HTTP/1.1\r\nHost: x\r\n\r\n"
    with siege.borne():
        with callers(siege, 2, ask) as viewers:
            for viewer in viewers:
                assert b"200" in viewer.recv(100)
            assert get(f"http://127.0.0.1:{siege.http_port}/api/live")[0] == 503
        until(lambda: _viewing(siege, ask), "a place for another viewer")
    assert siege.refused("http_viewers") >= 1


def _viewing(siege: Siege, ask: bytes) -> bool:
    with contextlib.closing(caller(siege, ask)) as viewer:
        return b" 200 " in viewer.recv(100)


def test_garbage_at_the_endpoint(siege: Siege) -> None:
    dice = random.Random(10)
    with siege.borne():
        for _ in range(100):
            with contextlib.closing(caller(siege, some_bytes(dice, 3000))) as connection:
                connection.shutdown(socket.SHUT_WR)
    until(lambda: healthy(siege), "a place at the endpoint")
