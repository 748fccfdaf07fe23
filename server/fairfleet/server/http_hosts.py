"""By which names the HTTP endpoint answers: round the function that answers every request.

A page of a stranger can have its own name lead to 127.0.0.1 a moment later (DNS rebinding), and then read what is
served there from its visitor's browser. Its requests carry that name. It must be a name that a stranger can have in the
world's DNS: neither an address nor a name without a dot is one, so `localhost`, and services in compose files and
clusters, need no setting.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Collection
from http import HTTPStatus

from fairfleet.server.http_endpoint import Answer, Page, Pages, Request
from fairfleet.server.http_token import OPEN
from fairfleet.server.limits import Refusals

ANY = "*"


def with_hosts(pages: Pages, hosts: Collection[str], refusals: Refusals) -> Pages:
    """Answers only who calls the server by an address, a name without a dot, or one of these."""
    known = {host.lower().rstrip(".") for host in hosts}

    async def answer(request: Request) -> Answer:
        host = host_of(request.headers.get("host", ""))
        if ANY in known or request.path in OPEN or is_harmless(host) or host in known:
            return await pages(request)
        refusals.add("http_host")
        words = b"this server does not answer by that name: add it to http.hosts, or set http.token\n"
        return Page(HTTPStatus.MISDIRECTED_REQUEST, words)

    return answer


def host_of(header: str) -> str:
    """Without the port.

    >>> host_of("Fleet.example.:8441"), host_of("[::1]:8441"), host_of("127.0.0.1")
    ('fleet.example', '::1', '127.0.0.1')
    """
    if header.startswith("["):
        return header[1:].partition("]")[0]
    return header.partition(":")[0].strip().lower().rstrip(".")


def is_harmless(host: str) -> bool:
    """No browser sends it for a page that came from a name of somebody else's."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return "." not in host
    return True
