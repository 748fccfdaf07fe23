"""Parse addresses of servers, and decide which of them never leave this machine.

An address is `host:port` or a Unix socket. No name is resolved here.
"""

from __future__ import annotations

import ipaddress

from fairfleet.common.errors import UsageError


def host_of(address: str) -> str:
    """Return the host of an address, without port and brackets.

    >>> host_of("fleet.example:8440"), host_of("[::1]:8440")
    ('fleet.example', '::1')
    """
    return address.rpartition(":")[0].removeprefix("[").removesuffix("]")


def with_port(address: str, port: int) -> str:
    """Return an address with another port.

    >>> with_port("[::1]:8440", 8442)
    '[::1]:8442'
    """
    return f"{address.rpartition(':')[0]}:{port}"


def is_loopback(address: str) -> bool:
    """Return whether an address always stays on this machine.

    The only trusted name is localhost, because a name server decides what other names mean.

    >>> is_loopback("127.0.0.1:8440"), is_loopback("[::1]:0"), is_loopback("localhost:1")
    (True, True, True)
    >>> is_loopback("unix:/run/x")
    True
    >>> is_loopback("0.0.0.0:8440"), is_loopback("fleet.example:8440")
    (False, False)
    >>> is_loopback("127.evil.example:1")
    False
    """
    if address.startswith(("unix:", "unix-abstract:")):
        return True
    host = host_of(address)
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def dialled(listen: str) -> str:
    """Return the address at which a program on this machine calls a server that listens there.

    A server that listens on all interfaces is called on loopback, because no certificate is valid
    for the address 0.0.0.0.

    >>> dialled("0.0.0.0:8440"), dialled("[::]:8440"), dialled("10.0.0.5:8440")
    ('127.0.0.1:8440', '[::1]:8440', '10.0.0.5:8440')
    """
    loopback = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}
    host, _, port = listen.rpartition(":")
    return f"{loopback.get(host, host)}:{port}"


def leads_here(address: str) -> bool:
    """Return whether a call to the address ends on this machine.

    This includes 0.0.0.0 and ::, which a caller may copy from the server's listen address.
    """
    return is_loopback(address) or host_of(address) in ("0.0.0.0", "::")


def check_unencrypted(address: str, insecure: bool) -> None:
    """Raise UsageError if an unencrypted call would leave this machine and is not permitted."""
    if not insecure and not leads_here(address):
        raise UsageError(
            f"{address} is another machine, and no credentials were given: everything would be "
            "sent unencrypted. Give --credentials NAME.fleet (see `fairfleet enroll`), or "
            "--insecure to permit this."
        )
