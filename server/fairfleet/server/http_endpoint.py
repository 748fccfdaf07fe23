"""HTTP for people and machines that watch: a few pages and streams, each computed on the event loop.

HTTP itself is spoken in threads of its own, so a slow reader holds nothing up; and since the loop computes the
pages, an answer proves that it still turns. Every request passes through the one function that is given here:
whoever wants to check callers wraps that.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import logging
import re
import socket
import sys
import threading
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Generator, Iterator, Mapping
from concurrent.futures import CancelledError
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from socketserver import TCPServer, ThreadingMixIn
from typing import Any, NamedTuple, TypeVar
from urllib.parse import parse_qsl

from fairfleet.common.errors import UsageError
from fairfleet.server.limits import Refusals

log = logging.getLogger(__name__)

LOOP_SECONDS = 5.0  # for the event loop to compute a page; else it is stuck
STOP_SECONDS = 0.1  # within which a stop is noticed
MESSAGE_SECONDS = 60.0  # between two messages of a stream, which says every few seconds that it lives
PLAIN = "text/plain; charset=utf-8"
QUERY = re.compile(r"\?\S*")
FULL = b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


class HttpLimits(NamedTuple):
    """What callers may take; every connection holds a thread."""

    connections: int = 256
    viewers: int = 64  # of streams
    header_bytes: int = 16 << 10  # of a request: its line and its headers
    seconds: float = 30.0  # for a whole request to come, and for each part of its answer to go


class Request(NamedTuple):
    path: str
    query: Mapping[str, str] = {}
    headers: Mapping[str, str] = {}  # by name in lower case


class Page(NamedTuple):
    status: HTTPStatus
    body: bytes
    content_type: str = PLAIN
    headers: Mapping[str, str] = {}


class Stream(NamedTuple):
    """Server-sent events, for as long as there are any and somebody listens."""

    messages: AsyncGenerator[bytes]


Answer = Page | Stream
Pages = Callable[[Request], Coroutine[Any, Any, Answer]]
T = TypeVar("T")


class Loop:
    """The event loop, as seen from the threads that speak HTTP."""

    def __init__(self, pages: Pages, limits: HttpLimits, refusals: Refusals) -> None:
        self.limits = limits
        self.refusals = refusals
        self._loop = asyncio.get_running_loop()
        self._pages = pages
        self._streams = threading.BoundedSemaphore(limits.viewers)

    def answer(self, request: Request) -> Answer:
        if self._loop.is_closed():  # a connection that was kept open outlives the stop for a moment
            return Page(HTTPStatus.SERVICE_UNAVAILABLE, b"stopped\n")
        try:
            return self._run(self._pages(request), LOOP_SECONDS)
        except TimeoutError:
            return Page(HTTPStatus.SERVICE_UNAVAILABLE, b"the event loop is stuck\n")
        except Exception:
            log.exception("cannot answer %s", request.path)
            return Page(HTTPStatus.INTERNAL_SERVER_ERROR, b"failed; see the log\n")

    @contextlib.contextmanager
    def place(self) -> Iterator[bool]:
        """One of the few places for streams; False: all are taken."""
        free = self._streams.acquire(blocking=False)
        try:
            yield free
        finally:
            if free:
                self._streams.release()

    def messages(self, stream: Stream) -> Generator[bytes]:
        try:
            while not self._loop.is_closed():
                yield self._run(anext(stream.messages), MESSAGE_SECONDS)
        except (StopAsyncIteration, TimeoutError, CancelledError):
            return
        finally:
            if not self._loop.is_closed():
                asyncio.run_coroutine_threadsafe(stream.messages.aclose(), self._loop)

    def _run(self, work: Awaitable[T], seconds: float) -> T:
        async def awaited() -> T:
            return await work

        future = asyncio.run_coroutine_threadsafe(awaited(), self._loop)
        try:
            return future.result(seconds)
        except TimeoutError:
            future.cancel()
            raise


class HttpEndpoint:
    """Listens from its making on; answers between `start` and `stop`."""

    def __init__(
        self,
        host: str,
        port: int,
        pages: Pages,
        limits: HttpLimits = HttpLimits(),  # noqa: B008  # a value
        refusals: Refusals | None = None,
    ) -> None:
        self._server = _bind(host, port, Loop(pages, limits, refusals or Refusals()))
        serve = self._server.serve_forever
        self._thread = threading.Thread(target=serve, args=(STOP_SECONDS,), name="http", daemon=True)

    @property
    def url(self) -> str:
        host, port = self._server.server_address[:2]
        return (
            f"http://[{host!s}]:{port}" if self._server.address_family == socket.AF_INET6 else f"http://{host!s}:{port}"
        )

    def start(self) -> None:
        self._thread.start()

    async def stop(self) -> None:
        if self._thread.is_alive():
            await asyncio.to_thread(self._server.shutdown)
        self._server.server_close()


def _bind(host: str, port: int, event_loop: Loop) -> TCPServer:
    class Handler(_Handler):
        loop = event_loop
        timeout = event_loop.limits.seconds

    class Server(_Server):
        address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        loop = event_loop
        places = threading.BoundedSemaphore(event_loop.limits.connections)

    try:
        return Server((host, port), Handler)
    except OSError as error:
        raise UsageError(
            f"cannot serve metrics on {host}:{port}: {error.strerror}. Stop the other program, or give another "
            "--set http.port=… (0 takes a free one)."
        ) from error


class _Server(ThreadingMixIn, TCPServer):
    """Not http.server's own, which asks the DNS for the host's name before it listens."""

    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 128
    loop: Loop
    places: threading.BoundedSemaphore

    def process_request(self, request: Any, client_address: Any) -> None:
        """In a thread of its own, if there is a place for one."""
        if not self.places.acquire(blocking=False):
            self.loop.refusals.add("http_connections")
            with contextlib.suppress(OSError):
                request.setblocking(False)
                request.sendall(FULL)
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:  # no thread could be started
            self.places.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.places.release()

    def handle_error(self, request: object, client_address: object) -> None:
        if isinstance(sys.exception(), OSError):
            log.debug("http: %s hung up", client_address)
        else:
            log.exception("cannot talk to %s", client_address)


class TooLarge(Exception):
    """A request's line and headers are more than a caller may send."""


class _Head(io.RawIOBase):
    """What a caller says, as long as it says it in time and briefly.

    A socket's own timeout begins anew with every byte, so who sends one now and then could hold a thread for ever.
    """

    def __init__(self, connection: socket.socket, limits: HttpLimits) -> None:
        self._connection = connection
        self._limits = limits
        self.begin()

    def begin(self) -> None:
        """The next request."""
        self._ends = time.monotonic() + self._limits.seconds
        self._left = self._limits.header_bytes

    @property
    def began(self) -> bool:
        """Whether anything of the request has come."""
        return self._left < self._limits.header_bytes

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if self._left <= 0:
            raise TooLarge
        self._connection.settimeout(max(0.001, self._ends - time.monotonic()))
        try:
            count = self._connection.recv_into(memoryview(buffer)[: self._left])
        finally:
            self._connection.settimeout(self._limits.seconds)  # for answers
        self._left -= count
        return count


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_version = "fairfleet"
    sys_version = ""
    loop: Loop

    def setup(self) -> None:
        super().setup()
        self._head = _Head(self.connection, self.loop.limits)
        self.rfile = io.BufferedReader(self._head)

    def handle_one_request(self) -> None:
        self._head.begin()
        try:
            super().handle_one_request()
        except TooLarge:
            self.loop.refusals.add("http_headers")
            self.close_connection = True
            self.requestline, self.request_version, self.command = "", self.protocol_version, ""
            limit = self.loop.limits.header_bytes
            words = f"a request's line and headers may have {limit} bytes together\n"
            self._send(Page(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, words.encode()))

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        if code in (HTTPStatus.REQUEST_URI_TOO_LONG, HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE):
            self.loop.refusals.add("http_headers")  # too many of them: that is http.server's own limit
        super().send_error(code, message, explain)

    def log_error(self, format: str, *args: Any) -> None:
        """Called for a timeout, and for requests that are not HTTP."""
        if "timed out" in format and self._head.began:
            self.loop.refusals.add("http_slow")
        super().log_error(format, *args)

    def do_GET(self) -> None:
        if "Content-Length" in self.headers or "Transfer-Encoding" in self.headers:
            self.close_connection = True  # a body is not read, so nothing behind it can be understood
        path, _, query = self.path.partition("?")
        headers = {name.lower(): value for name, value in self.headers.items()}
        answer = self.loop.answer(Request(path, dict(parse_qsl(query)), headers))
        if isinstance(answer, Page):
            self._send(answer)
        else:
            self._stream(answer)

    def _send(self, page: Page) -> None:
        self.send_response(page.status)
        self.send_header("Content-Type", page.content_type)
        self.send_header("Content-Length", str(len(page.body)))
        for name, value in page.headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(page.body)

    def _stream(self, stream: Stream) -> None:
        self.close_connection = True  # the end of the stream is the end of the connection
        with self.loop.place() as free, contextlib.closing(self.loop.messages(stream)) as messages:
            if not free:
                self.loop.refusals.add("http_viewers")
                self._send(Page(HTTPStatus.SERVICE_UNAVAILABLE, b"too many watch already; close another page\n"))
                return
            self.send_response(HTTPStatus.OK)
            self.send_header("Content-Type", "text/event-stream")
            self.send_header("Cache-Control", "no-store")
            self.send_header("Connection", "close")
            self.end_headers()
            try:
                for message in messages if self.command != "HEAD" else ():
                    self.wfile.write(message)
            except TimeoutError:
                self.loop.refusals.add("slow_reader")
                raise

    do_HEAD = do_GET  # noqa: N815

    def log_message(self, format: str, *args: Any) -> None:
        log.debug("http: " + format, *(QUERY.sub("?…", str(word)) for word in args))  # a query may hold a token
