"""Addresses of servers: which of them never leave this machine."""

from __future__ import annotations

import ipaddress

from fairfleet.common.errors import UsageError


def host_of(address: str) -> str:
    """
    >>> host_of("fleet.example:8440"), host_of("[::1]:8440")
    ('fleet.example', '::1')
    """
    return address.rpartition(":")[0].removeprefix("[").removesuffix("]")


def with_port(address: str, port: int) -> str:
    """
    >>> with_port("[::1]:8440", 8442)
    '[::1]:8442'
    """
    return f"{address.rpartition(':')[0]}:{port}"


def is_loopback(address: str) -> bool:
    """No name but localhost is trusted to be one: whoever answers for the names decides where they lead.

    >>> is_loopback("127.0.0.1:8440"), is_loopback("[::1]:0"), is_loopback("localhost:1"), is_loopback("unix:/run/x")
    (True, True, True, True)
    >>> is_loopback("0.0.0.0:8440"), is_loopback("fleet.example:8440"), is_loopback("127.evil.example:1")
    (False, False, False)
    """
    if address.startswith(("unix:", "unix-abstract:")):
        return True
    host = host_of(address)
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def dialled(listen: str) -> str:
    """Where to call a server on this machine that listens there: no certificate is for "everywhere".

    >>> dialled("0.0.0.0:8440"), dialled("[::]:8440"), dialled("10.0.0.5:8440")
    ('127.0.0.1:8440', '[::1]:8440', '10.0.0.5:8440')
    """
    everywhere = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}
    host, _, port = listen.rpartition(":")
    return f"{everywhere.get(host, host)}:{port}"


def leads_here(address: str) -> bool:
    """Where a call to it ends on this machine: a server that listens everywhere is called so, too."""
    return is_loopback(address) or host_of(address) in ("0.0.0.0", "::")


def check_clear(address: str, insecure: bool) -> None:
    """Clear text is for this machine, or for whoever says that it is meant."""
    if not insecure and not leads_here(address):
        raise UsageError(
            f"{address} is another machine, and no credentials were given: everything would go in the clear. Give "
            "--credentials NAME.fleet (see `fairfleet enroll`), or --insecure if that is what you want."
        )
