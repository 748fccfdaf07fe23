"""The HTTP endpoint answers only to its own host names, so that no other page can read it."""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import Any

import pytest

from fairfleet.server.monitoring.http_endpoint import Page, Request
from fairfleet.server.monitoring.http_hosts import with_hosts
from fairfleet.server.security.rate_limits import Refusals


def ask(
    host: str | None, hosts: tuple[str, ...] = (), path: str = "/metrics"
) -> tuple[HTTPStatus, int]:
    """Return the status, and the number of refusals counted."""
    refusals = Refusals()

    async def pages(request: Request) -> Page:
        return Page(HTTPStatus.OK, b"seen")

    headers = {} if host is None else {"host": host}
    answer: Any = asyncio.run(with_hosts(pages, hosts, refusals)(Request(path, {}, headers)))
    assert (b"seen" in answer.body) is (answer.status is HTTPStatus.OK)
    return answer.status, refusals.counts()["http_host"]


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:8441",
        "EVIL.example.:80",
        "127.0.0.1.evil.example",
        "localhost.evil.example:8441",
        "1.2.3.4.5",
        "127.0.0.1@evil.example",
        "evil.example:@127.0.0.1",
        "server.evil.example",
    ],
)
@pytest.mark.parametrize("path", ["/", "/metrics", "/api/state", "/nowhere"])
def test_a_page_of_another_name_reads_nothing(host: str, path: str) -> None:
    assert ask(host, ("fleet.example",), path) == (HTTPStatus.MISDIRECTED_REQUEST, 1)


@pytest.mark.parametrize(
    "host",
    [None, "", "localhost", "localhost:8441", "LOCALHOST.", "127.0.0.1:8441", "[::1]:8441",
     "192.168.1.7:8441", "server:8441", "fairfleet-server"],
)  # fmt: skip
def test_addresses_and_names_without_a_dot_need_no_setting(host: str | None) -> None:
    assert ask(host) == (HTTPStatus.OK, 0)


def test_configured_names_are_answered_and_probes_by_any_name() -> None:
    assert ask("fleet.Example:8441", ("Fleet.example.",)) == (HTTPStatus.OK, 0)
    assert ask("any.thing", ("*",)) == (HTTPStatus.OK, 0)
    for probe in ("/healthz", "/readyz"):
        assert ask("any.thing", path=probe) == (HTTPStatus.OK, 0)
