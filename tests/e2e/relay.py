"""A cable on loopback that can be cut and mended: what it carried breaks off, and nobody answers meanwhile."""

from __future__ import annotations

import contextlib
import socket
import threading


class Relay:
    def __init__(self, server_port: int) -> None:
        self._server_port = server_port
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
                for ends in ((client, server), (server, client)):
                    threading.Thread(target=_pump, args=ends, daemon=True).start()


def _pump(source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            sink.sendall(data)
        sink.shutdown(socket.SHUT_RDWR)
