"""A relay on loopback that can be cut and repaired.

A cut ends all connections, and no new one is accepted until the repair.
"""

from __future__ import annotations

import contextlib
import socket
import threading

from tests.support.fleet import Fleet


class Relay:
    """A listener that passes bytes on between clients and one server."""

    def __init__(self, server_port: int, break_after_bytes: int | None = None) -> None:
        """End each connection after the server sent `break_after_bytes` over it."""
        self._server_port, self._break_after_bytes = server_port, break_after_bytes
        self.breaks = 0
        self._sockets: list[socket.socket] = []
        self._port = 0
        self.repair()

    @property
    def address(self) -> str:
        """Where clients connect to the relay."""
        return f"127.0.0.1:{self._port}"

    def repair(self) -> None:
        """Accept connections, at the same port as before."""
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", self._port))
        listener.listen()
        self._port = listener.getsockname()[1]
        self._sockets.append(listener)
        threading.Thread(target=self._accept, args=[listener], daemon=True).start()

    def cut(self) -> None:
        """End all connections and accept none."""
        for connection in self._sockets:
            with contextlib.suppress(OSError):  # the peer has closed it already
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()
        self._sockets.clear()

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):  # the listener is closed
            while True:
                client, _ = listener.accept()
                server = socket.create_connection(("127.0.0.1", self._server_port))
                self._sockets += (client, server)
                for ends in ((client, server, None), (server, client, self._break_after_bytes)):
                    threading.Thread(target=self._pump, args=ends, daemon=True).start()

    def _pump(
        self, source: socket.socket, sink: socket.socket, break_after_bytes: int | None
    ) -> None:
        received = 0
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                sink.sendall(data)
                received += len(data)
                if break_after_bytes and received > break_after_bytes:
                    self.breaks += 1
                    source.shutdown(socket.SHUT_RDWR)
                    break
            sink.shutdown(socket.SHUT_RDWR)


class RelayedFleet(Fleet):
    """Clients that start while there is a relay connect through it."""

    relay: Relay | None = None

    def address_for(self, name: str) -> str:
        """Return the address of the relay, if there is one."""
        return self.relay.address if self.relay else self.address
