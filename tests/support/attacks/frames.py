"""HTTP/2 frames written by hand, which no library would send, and a parser of the answers."""

from __future__ import annotations

import contextlib
import socket
import ssl
import struct
from collections.abc import Iterable, Iterator

from hpack import Encoder
from hyperframe.frame import Frame

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = (
    0,
    1,
    3,
    4,
    6,
    7,
    8,
    9,
)
END_STREAM, END_HEADERS = 1, 4
PATIENCE_SECONDS = 30.0


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return (
        struct.pack(">I", len(payload))[1:]
        + bytes([kind, flags])
        + struct.pack(">I", stream)
        + payload
    )


def request(path: str, *more: tuple[str, str]) -> bytes:
    """Return the header block of a gRPC call."""
    usual = [
        (":method", "POST"),
        (":scheme", "http"),
        (":path", path),
        (":authority", "x"),
        ("te", "trailers"),
    ]
    block: bytes = Encoder().encode(
        [*usual, ("content-type", "application/grpc"), *more], huffman=False
    )
    return block


def message(data: bytes) -> bytes:
    """Return a message as gRPC frames it inside DATA."""
    return b"\0" + struct.pack(">I", len(data)) + data


class Wire:
    """One connection. Errors while sending are ignored: the server may close it at any time."""

    def __init__(
        self,
        port: int,
        preface: bytes = PREFACE + frame(SETTINGS, 0, 0),
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_SECONDS)
        if tls:
            self.socket = tls.wrap_socket(self.socket, server_hostname="localhost")
        self.send(preface)

    def send(self, *data: bytes) -> bool:
        """Send bytes; return whether the other side accepted them."""
        try:
            for part in data:
                self.socket.sendall(part)
        except OSError:
            return False
        return True

    def frames(self) -> Iterator[Frame]:
        """Yield frames until the server closes the connection; TimeoutError if neither happens."""
        buffer = b""
        while True:
            while len(buffer) >= 9:
                length = int.from_bytes(buffer[:3], "big")
                if len(buffer) < 9 + length:
                    break
                frame, _ = Frame.parse_frame_header(memoryview(buffer[:9]))
                frame.parse_body(memoryview(buffer[9 : 9 + length]))
                buffer = buffer[9 + length :]
                yield frame
            try:
                more = self.socket.recv(65536)
            except ConnectionError:
                return
            if not more:
                return
            buffer += more

    def until_closed(self) -> list[Frame]:
        return list(self.frames())

    def close(self) -> None:
        self.socket.close()


@contextlib.contextmanager
def wires(
    port: int, count: int, preface: bytes = PREFACE + frame(SETTINGS, 0, 0)
) -> Iterator[list[Wire]]:
    """Open this many connections at once, or as many as the server accepts."""
    opened: list[Wire] = []
    try:
        for _ in range(count):
            with contextlib.suppress(OSError):
                opened.append(Wire(port, preface))
        yield opened
    finally:
        for wire in opened:
            wire.close()


def closed(wires: Iterable[Wire]) -> int:
    """Return how many connections the server has closed."""
    count = 0
    for wire in wires:
        wire.socket.setblocking(False)
        try:
            while wire.socket.recv(65536):
                pass
            count += 1
        except BlockingIOError:
            pass
        except OSError:
            count += 1
        finally:
            wire.socket.settimeout(PATIENCE_SECONDS)
    return count
