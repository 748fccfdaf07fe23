"""HTTP for people and machines that watch: a few pages and streams, each computed on the event loop.

HTTP itself is spoken in threads of its own, so a slow reader holds nothing up; and since the loop computes the
pages, an answer proves that it still turns. Every request passes through the one function that is given here:
whoever wants to check callers wraps that.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import sys
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Generator, Iterator, Mapping
from concurrent.futures import CancelledError
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from socketserver import TCPServer, ThreadingMixIn
from typing import Any, NamedTuple, TypeVar
from urllib.parse import parse_qsl

from fairfleet.common.errors import UsageError

log = logging.getLogger(__name__)

LOOP_SECONDS = 5.0  # for the event loop to compute a page; else it is stuck
STOP_SECONDS = 0.1  # within which a stop is noticed
IDLE_SECONDS = 30.0  # for a caller to say something
MESSAGE_SECONDS = 60.0  # between two messages of a stream, which says every few seconds that it lives
PLAIN = "text/plain; charset=utf-8"


STREAMS = 64  # open at the same time: each holds a thread


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

    def __init__(self, pages: Pages) -> None:
        self._loop = asyncio.get_running_loop()
        self._pages = pages
        self._streams = threading.BoundedSemaphore(STREAMS)

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

    def __init__(self, host: str, port: int, pages: Pages) -> None:
        self._server = _bind(host, port, Loop(pages))
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

    class Server(_Server):
        address_family = socket.AF_INET6 if ":" in host else socket.AF_INET

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

    def handle_error(self, request: object, client_address: object) -> None:
        if isinstance(sys.exception(), OSError):
            log.debug("http: %s hung up", client_address)
        else:
            log.exception("cannot talk to %s", client_address)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_version = "fairfleet"
    sys_version = ""
    timeout = IDLE_SECONDS
    loop: Loop

    def do_GET(self) -> None:
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
                self._send(Page(HTTPStatus.SERVICE_UNAVAILABLE, b"too many watch already; close another page\n"))
                return
            self.send_response(HTTPStatus.OK)
            self.send_header("Content-Type", "text/event-stream")
            self.send_header("Cache-Control", "no-store")
            self.send_header("Connection", "close")
            self.end_headers()
            for message in messages if self.command != "HEAD" else ():
                self.wfile.write(message)
                self.wfile.flush()

    do_HEAD = do_GET  # noqa: N815

    def log_message(self, format: str, *args: Any) -> None:
        log.debug("http: " + format, *args)
