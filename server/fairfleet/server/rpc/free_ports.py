"""Checks that the server's ports are free, before a state directory is made.

A port that another program takes in between is refused when it is bound, as before.
"""

from __future__ import annotations

import contextlib
import errno
import socket

from fairfleet.common.errors import UsageError
from fairfleet.server.settings import ServerSettings


def check_ports(settings: ServerSettings) -> None:
    """Raise UsageError, in one line, for a port that another program listens on."""
    addresses = {
        "--listen": settings.listen,
        "--enrolment": settings.enrolment,
        "--set http.port": f"{settings.http.host}:{settings.http_port}",
    }
    for option, address in addresses.items():
        if address and _is_in_use(address):
            raise UsageError(
                f"cannot listen on {address}: the port is in use. Stop the other program, or give "
                f"another {option} (port 0 takes a free one)."
            )


def _is_in_use(address: str) -> bool:
    """Return whether a port is taken; false if only binding it can tell."""
    host, _, port = address.rpartition(":")
    if not port.isdecimal() or not int(port):
        return False
    with contextlib.suppress(OSError):
        found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
        return any(_refused(family, place) for family, *_, place in found)
    return False


def _refused(family: int, place: tuple[object, ...]) -> bool:
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        # A port whose last connections still end can be bound again, as gRPC does.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        try:
            probe.bind(place)
        except OSError as error:
            return error.errno == errno.EADDRINUSE
    return False
