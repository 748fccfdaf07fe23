"""An HTTP server for pages and server-sent events: threads speak HTTP, the event loop answers.

Every request passes through one async function that runs on the server's event loop. So an answer
proves that the loop still runs, and pages need no locks. Each connection has a thread of its own,
so a slow reader delays nobody. To check callers, wrap the function: `http_hosts`, `http_token`.

The server is written on `http.server` because asyncio libraries need more memory and lack most of
the limits below; docs/explanation/architecture.md has the figures.
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
from collections.abc import (
    AsyncGenerator,
    Awaitable,
    Callable,
    Coroutine,
    Generator,
    Iterator,
    Mapping,
)
from concurrent.futures import CancelledError
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from socketserver import TCPServer, ThreadingMixIn
from typing import Any, NamedTuple, TypeVar
from urllib.parse import parse_qsl

from fairfleet.common.errors import UsageError
from fairfleet.server.security.limits import ServerLimits
from fairfleet.server.security.rate_limits import Refusals

log = logging.getLogger(__name__)

LOOP_SECONDS = 5.0  # the event loop has this long to compute a page; after that it is stuck
STOP_SECONDS = 0.1  # a stop is noticed within this time
MESSAGE_SECONDS = 60.0  # between messages of a stream, which sends a sign of life more often
PLAIN = "text/plain; charset=utf-8"
QUERY = re.compile(r"\?\S*")
NO_CONNECTION_FREE = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
)


class HttpLimits(NamedTuple):
    """The limits on callers. Every connection holds a thread."""

    connections: int = 256
    viewers: int = 64  # of event streams
    header_bytes: int = 16 << 10  # of the request line and the headers together
    seconds: float = 30.0  # to receive a whole request, and to send each part of its answer

    @classmethod
    def of(cls, limits: ServerLimits) -> HttpLimits:
        """Return the part of a server's limits that concerns HTTP."""
        return cls(
            limits.http_connections,
            limits.http_viewers,
            limits.http_header_bytes,
            limits.http_seconds,
        )


class Request(NamedTuple):
    """A GET or HEAD request; the names of its headers are in lower case."""

    path: str
    query: Mapping[str, str] = {}
    headers: Mapping[str, str] = {}


class Page(NamedTuple):
    """A complete answer."""

    status: HTTPStatus
    body: bytes
    content_type: str = PLAIN
    headers: Mapping[str, str] = {}


class Stream(NamedTuple):
    """Server-sent events, until the generator ends or the viewer disconnects."""

    messages: AsyncGenerator[bytes]


Answer = Page | Stream
Pages = Callable[[Request], Coroutine[Any, Any, Answer]]
T = TypeVar("T")


class HttpEndpoint:
    """The HTTP server. It listens once it is constructed, and answers between start and stop."""

    def __init__(
        self,
        host: str,
        port: int,
        pages: Pages,
        limits: HttpLimits = HttpLimits(),  # noqa: B008  # immutable
        refusals: Refusals | None = None,
    ) -> None:
        """Listen on an address; raise UsageError if that fails. Needs a running event loop."""
        bridge = LoopBridge(pages, limits, refusals or Refusals())
        try:
            self._server = _Server(host, port, bridge)
        except OSError as error:
            raise UsageError(
                f"cannot serve metrics on {host}:{port}: {error.strerror}. Stop the other program, "
                "or give another --set http.port=… (0 takes a free one)."
            ) from error
        serve = self._server.serve_forever
        self._thread = threading.Thread(
            target=serve, args=(STOP_SECONDS,), name="http", daemon=True
        )

    @property
    def url(self) -> str:
        """The address that the server listens on, as an HTTP URL."""
        host, port = self._server.server_address[:2]
        is_ipv6 = self._server.address_family == socket.AF_INET6
        return f"http://[{host!s}]:{port}" if is_ipv6 else f"http://{host!s}:{port}"

    def start(self) -> None:
        """Begin to answer requests."""
        self._thread.start()

    async def stop(self) -> None:
        """Stop listening. Open connections get 503 once the event loop is closed."""
        if self._thread.is_alive():
            await asyncio.to_thread(self._server.shutdown)
        self._server.server_close()


class LoopBridge:
    """Runs the page function on the event loop, for the threads that speak HTTP."""

    def __init__(self, pages: Pages, limits: HttpLimits, refusals: Refusals) -> None:
        self.limits = limits
        self.refusals = refusals
        self._loop = asyncio.get_running_loop()
        self._pages = pages
        self._viewer_slots = threading.BoundedSemaphore(limits.viewers)

    def answer(self, request: Request) -> Answer:
        """Return the answer to a request; 503 if the event loop is closed or stuck."""
        if self._loop.is_closed():  # an open connection outlives the stop for a moment
            return Page(HTTPStatus.SERVICE_UNAVAILABLE, b"stopped\n")
        try:
            return self._run(self._pages(request), LOOP_SECONDS)
        except TimeoutError:
            return Page(HTTPStatus.SERVICE_UNAVAILABLE, b"the event loop is stuck\n")
        except Exception:
            log.exception("cannot answer %s", request.path)
            return Page(HTTPStatus.INTERNAL_SERVER_ERROR, b"failed; see the log\n")

    @contextlib.contextmanager
    def viewer_slot(self) -> Iterator[bool]:
        """Hold one of the slots for viewers; yield False if none is free."""
        acquired = self._viewer_slots.acquire(blocking=False)
        try:
            yield acquired
        finally:
            if acquired:
                self._viewer_slots.release()

    def messages(self, stream: Stream) -> Generator[bytes]:
        """Yield the messages of a stream, each computed on the event loop."""
        try:
            while not self._loop.is_closed():
                yield self._run(anext(stream.messages), MESSAGE_SECONDS)
        except (StopAsyncIteration, TimeoutError, CancelledError):
            return
        finally:
            if not self._loop.is_closed():
                asyncio.run_coroutine_threadsafe(stream.messages.aclose(), self._loop)

    def _run(self, work: Awaitable[T], seconds: float) -> T:
        async def result() -> T:
            return await work

        future = asyncio.run_coroutine_threadsafe(result(), self._loop)
        try:
            return future.result(seconds)
        except TimeoutError:
            future.cancel()
            raise


class _Server(ThreadingMixIn, TCPServer):
    """A thread per connection, up to a limit. http.server's own class asks DNS for a host name."""

    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 128

    def __init__(self, host: str, port: int, bridge: LoopBridge) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.bridge = bridge
        self._connection_slots = threading.BoundedSemaphore(bridge.limits.connections)
        super().__init__((host, port), _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve a connection in a thread of its own, or refuse it if no slot is free."""
        if not self._connection_slots.acquire(blocking=False):
            self._refuse(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:  # no thread could be started
            self._connection_slots.release()
            raise

    def _refuse(self, request: socket.socket) -> None:
        self.bridge.refusals.add("http_connections")
        with contextlib.suppress(OSError):
            request.setblocking(False)
            request.sendall(NO_CONNECTION_FREE)
        self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Serve a connection, then free its slot."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._connection_slots.release()

    def handle_error(self, request: object, client_address: object) -> None:
        """Log a failed connection; one that the caller ended is no error."""
        if isinstance(sys.exception(), OSError):
            log.debug("http: %s disconnected", client_address)
        else:
            log.exception("cannot serve %s", client_address)


class HeadTooLarge(Exception):
    """A request's line and headers exceed the limit."""


class _HeadReader(io.RawIOBase):
    """Reads the heads of requests from a socket, limited in size and in total time.

    The timeout of a socket starts again with every byte, so a caller that sends a byte now and then
    could hold a thread forever.
    """

    def __init__(self, connection: socket.socket, limits: HttpLimits) -> None:
        self._connection = connection
        self._limits = limits
        self.begin_request()

    def begin_request(self) -> None:
        """Start the limits again for the next request."""
        self._deadline = time.monotonic() + self._limits.seconds
        self._remaining_bytes = self._limits.header_bytes

    @property
    def has_begun(self) -> bool:
        """Whether any byte of the request has arrived."""
        return self._remaining_bytes < self._limits.header_bytes

    def readable(self) -> bool:
        """Return True: the reader is for reading only."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Read what has arrived; raise HeadTooLarge or TimeoutError beyond the limits."""
        if self._remaining_bytes <= 0:
            raise HeadTooLarge
        self._connection.settimeout(max(0.001, self._deadline - time.monotonic()))
        try:
            count = self._connection.recv_into(memoryview(buffer)[: self._remaining_bytes])
        finally:
            self._connection.settimeout(self._limits.seconds)  # for the answer
        self._remaining_bytes -= count
        return count


class _Handler(BaseHTTPRequestHandler):
    """Serves one connection in its thread."""

    protocol_version = "HTTP/1.1"
    server_version = "fairfleet"
    sys_version = ""
    disable_nagle_algorithm = True  # else a body waits 40 ms for the headers to be acknowledged
    server: _Server

    def setup(self) -> None:
        """Read requests through a reader with limits."""
        self._bridge = self.server.bridge
        super().setup()
        self.connection.settimeout(self._bridge.limits.seconds)
        self._head_reader = _HeadReader(self.connection, self._bridge.limits)
        self.rfile = io.BufferedReader(self._head_reader)

    def handle_one_request(self) -> None:
        """Answer one request; one with too large a head gets 431."""
        self._head_reader.begin_request()
        try:
            super().handle_one_request()
        except HeadTooLarge:
            self._refuse_head()

    def _refuse_head(self) -> None:
        self._bridge.refusals.add("http_headers")
        self.close_connection = True
        self.requestline, self.request_version, self.command = "", self.protocol_version, ""
        limit = self._bridge.limits.header_bytes
        text = f"a request's line and headers may have {limit} bytes together\n"
        self._send(Page(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, text.encode()))

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Send an error of http.server, which has limits on lines and headers of its own."""
        if code in (HTTPStatus.REQUEST_URI_TOO_LONG, HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE):
            self._bridge.refusals.add("http_headers")
        super().send_error(code, message, explain)

    def log_error(self, log_format: str, *args: Any) -> None:
        """Log a timeout or a malformed request; count a request that began and did not end."""
        if "timed out" in log_format and self._head_reader.has_begun:
            self._bridge.refusals.add("http_slow")
        super().log_error(log_format, *args)

    def do_GET(self) -> None:
        """Answer a GET or HEAD request with a page or a stream."""
        if "Content-Length" in self.headers or "Transfer-Encoding" in self.headers:
            # The body is not read, so what follows it cannot be told from it.
            self.close_connection = True
        path, _, query = self.path.partition("?")
        headers = {name.lower(): value for name, value in self.headers.items()}
        answer = self._bridge.answer(Request(path, dict(parse_qsl(query)), headers))
        if isinstance(answer, Page):
            self._send(answer)
        else:
            self._stream(answer)

    do_HEAD = do_GET  # noqa: N815

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
        self.close_connection = True  # the end of a stream is the end of its connection
        with (
            self._bridge.viewer_slot() as has_slot,
            contextlib.closing(self._bridge.messages(stream)) as messages,
        ):
            if has_slot:
                self._send_messages(messages)
                return
            self._bridge.refusals.add("http_viewers")
            text = b"too many viewers already; close another page\n"
            self._send(Page(HTTPStatus.SERVICE_UNAVAILABLE, text))

    def _send_messages(self, messages: Iterator[bytes]) -> None:
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Cache-Control", "no-store")
        self.send_header("Connection", "close")
        self.end_headers()
        try:
            for message in messages if self.command != "HEAD" else ():
                self.wfile.write(message)
        except TimeoutError:
            self._bridge.refusals.add("slow_reader")
            raise

    def log_message(self, log_format: str, *args: Any) -> None:
        """Log at debug level, without queries: they may hold a token."""
        log.debug("http: " + log_format, *(QUERY.sub("?…", str(word)) for word in args))
