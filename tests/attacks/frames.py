"""HTTP/2 spoken by hand: frames that no library would send, and what the other side says to them."""

from __future__ import annotations

import contextlib
import socket
import ssl
import struct
from collections.abc import Iterable, Iterator

from hpack import Encoder
from hyperframe.frame import Frame

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = 0, 1, 3, 4, 6, 7, 8, 9
END_STREAM, END_HEADERS = 1, 4
PATIENCE_SECONDS = 30.0


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


def request(path: str, *more: tuple[str, str]) -> bytes:
    """The block of headers of a gRPC call."""
    usual = [(":method", "POST"), (":scheme", "http"), (":path", path), (":authority", "x"), ("te", "trailers")]
    block: bytes = Encoder().encode([*usual, ("content-type", "application/grpc"), *more], huffman=False)
    return block


def message(data: bytes) -> bytes:
    """As gRPC frames it inside DATA."""
    return b"\0" + struct.pack(">I", len(data)) + data


class Wire:
    """One connection. Whatever happens to it while we send is no error: the server may hang up at any time."""

    def __init__(
        self, port: int, preface: bytes = PREFACE + frame(SETTINGS, 0, 0), tls: ssl.SSLContext | None = None
    ) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_SECONDS)
        if tls:
            self.socket = tls.wrap_socket(self.socket, server_hostname="localhost")
        self.send(preface)

    def send(self, *data: bytes) -> bool:
        """Whether the other side still took it."""
        try:
            for part in data:
                self.socket.sendall(part)
        except OSError:
            return False
        return True

    def frames(self) -> Iterator[Frame]:
        """What comes, until the server hangs up. Raises TimeoutError when it does neither."""
        left = b""
        while True:
            while len(left) >= 9:
                length = int.from_bytes(left[:3], "big")
                if len(left) < 9 + length:
                    break
                found, _ = Frame.parse_frame_header(memoryview(left[:9]))
                found.parse_body(memoryview(left[9 : 9 + length]))
                left = left[9 + length :]
                yield found
            try:
                more = self.socket.recv(65536)
            except ConnectionError:
                return
            if not more:
                return
            left += more

    def until_closed(self) -> list[Frame]:
        return list(self.frames())

    def close(self) -> None:
        self.socket.close()


@contextlib.contextmanager
def wires(port: int, count: int, preface: bytes = PREFACE + frame(SETTINGS, 0, 0)) -> Iterator[list[Wire]]:
    """So many connections, all open at the same time; fewer where the server takes no more."""
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
    """How many the server has hung up on."""
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
