"""HTTP for machines that watch: a few pages, each computed on the event loop.

HTTP itself is spoken in threads of its own, so a slow reader holds nothing up; and since the loop computes the
pages, an answer proves that it still turns.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
import threading
from collections.abc import Callable, Coroutine
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from socketserver import TCPServer, ThreadingMixIn
from typing import Any, NamedTuple

from fairfleet.common.errors import UsageError

log = logging.getLogger(__name__)

LOOP_SECONDS = 5.0  # for the event loop to compute a page; else it is stuck
STOP_SECONDS = 0.1  # within which a stop is noticed
IDLE_SECONDS = 30.0  # for a caller to say something
PLAIN = "text/plain; charset=utf-8"


class Page(NamedTuple):
    status: HTTPStatus
    body: bytes
    content_type: str = PLAIN


Pages = Callable[[str, str], Coroutine[Any, Any, Page]]  # from the path and the Accept header


class HttpEndpoint:
    """Listens from its making on; answers between `start` and `stop`."""

    def __init__(self, host: str, port: int, pages: Pages) -> None:
        loop = asyncio.get_running_loop()

        def ask(path: str, accept: str) -> Page:
            if loop.is_closed():  # a connection that was kept open outlives the stop for a moment
                return Page(HTTPStatus.SERVICE_UNAVAILABLE, b"stopped\n")
            answer = asyncio.run_coroutine_threadsafe(pages(path, accept), loop)
            try:
                return answer.result(LOOP_SECONDS)
            except TimeoutError:
                answer.cancel()
                return Page(HTTPStatus.SERVICE_UNAVAILABLE, b"the event loop is stuck\n")
            except Exception:
                log.exception("cannot answer %s", path)
                return Page(HTTPStatus.INTERNAL_SERVER_ERROR, b"failed; see the log\n")

        self._server = _bind(host, port, ask)
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


def _bind(host: str, port: int, ask: Callable[[str, str], Page]) -> TCPServer:
    class Handler(_Handler):
        page = staticmethod(ask)

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
    page: Callable[[str, str], Page]

    def do_GET(self) -> None:
        page = self.page(self.path.partition("?")[0], self.headers.get("Accept", ""))
        self.send_response(page.status)
        self.send_header("Content-Type", page.content_type)
        self.send_header("Content-Length", str(len(page.body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(page.body)

    do_HEAD = do_GET  # noqa: N815

    def log_message(self, format: str, *args: Any) -> None:
        log.debug("http: " + format, *args)
