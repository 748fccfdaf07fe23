"""A cable on loopback that can be cut and mended: what it carried breaks off, and nobody answers meanwhile."""

from __future__ import annotations

import contextlib
import socket
import threading

from tests.e2e.fleet import Fleet


class Relay:
    def __init__(self, server_port: int, lasts_bytes: int | None = None) -> None:
        """`lasts_bytes`: so many come from the server over one connection, then it breaks."""
        self._server_port, self._lasts_bytes = server_port, lasts_bytes
        self.breaks = 0
        self._sockets: list[socket.socket] = []
        self._port = 0
        self.mend()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._port}"

    def mend(self) -> None:
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", self._port))
        listener.listen()
        self._port = listener.getsockname()[1]
        self._sockets.append(listener)
        threading.Thread(target=self._accept, args=[listener], daemon=True).start()

    def cut(self) -> None:
        for one in self._sockets:
            with contextlib.suppress(OSError):  # the other end was quicker
                one.shutdown(socket.SHUT_RDWR)
            one.close()
        self._sockets.clear()

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):  # which ends it
            while True:
                client, _ = listener.accept()
                server = socket.create_connection(("127.0.0.1", self._server_port))
                self._sockets += (client, server)
                for ends in ((client, server, None), (server, client, self._lasts_bytes)):
                    threading.Thread(target=self._pump, args=ends, daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, lasts_bytes: int | None) -> None:
        came = 0
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                sink.sendall(data)
                came += len(data)
                if lasts_bytes and came > lasts_bytes:
                    self.breaks += 1
                    source.shutdown(socket.SHUT_RDWR)
                    break
            sink.shutdown(socket.SHUT_RDWR)


class Relayed(Fleet):
    """Clients that are started while there is a relay go through it."""

    relay: Relay | None = None

    def address_for(self, name: str) -> str:
        return self.relay.address if self.relay else self.address
