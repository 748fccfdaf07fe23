"""The host names that the HTTP endpoint answers to: a wrapper of its page function.

A page on a stranger's domain can make its own name resolve to 127.0.0.1 a moment later (DNS
rebinding), and then read the server's pages from a visitor's browser. Such requests carry the
stranger's name. That name must exist in public DNS, so it is neither an address nor a name without
a dot: `localhost`, and services in compose files and clusters, need no setting.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Collection
from http import HTTPStatus

from fairfleet.server.monitoring.http_endpoint import Answer, Page, Pages, Request
from fairfleet.server.monitoring.http_token import OPEN_PATHS
from fairfleet.server.security.rate_limits import Refusals

ANY_HOST = "*"
REFUSAL = Page(
    HTTPStatus.MISDIRECTED_REQUEST,
    b"this server does not answer to that name: add it to http.hosts, or set http.token\n",
)


def with_hosts(pages: Pages, hosts: Collection[str], refusals: Refusals) -> Pages:
    """Answer only requests to an address, to a name without a dot, or to one of `hosts`."""
    allowed_hosts = {host.lower().rstrip(".") for host in hosts}

    async def answer(request: Request) -> Answer:
        host = host_of(request.headers.get("host", ""))
        is_open = ANY_HOST in allowed_hosts or request.path in OPEN_PATHS
        if is_open or is_harmless(host) or host in allowed_hosts:
            return await pages(request)
        refusals.add("http_host")
        return REFUSAL

    return answer


def host_of(header: str) -> str:
    """Return the host of a Host header, without the port.

    >>> host_of("Fleet.example.:8441"), host_of("[::1]:8441"), host_of("127.0.0.1")
    ('fleet.example', '::1', '127.0.0.1')
    """
    if header.startswith("["):
        return header[1:].partition("]")[0]
    return header.partition(":")[0].strip().lower().rstrip(".")


def is_harmless(host: str) -> bool:
    """Return whether no browser sends this host for a page from a stranger's domain."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return "." not in host
    return True
