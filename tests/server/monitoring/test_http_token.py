"""The token of the HTTP endpoint: without it, callers see only health probes."""

from __future__ import annotations

import asyncio
import logging
import os
from http import HTTPStatus
from pathlib import Path
from typing import Any

import pytest

from fairfleet.common.errors import UsageError
from fairfleet.server.monitoring.http_endpoint import Page, Request
from fairfleet.server.monitoring.http_token import read_token, with_token
from fairfleet.server.rpc.endpoints import check_transport
from fairfleet.server.settings import ServerSettings

TOKEN = "0123456789abcdef-token"
SEEN = Page(HTTPStatus.OK, b"seen")


def ask(path: str = "/metrics", query: dict[str, str] | None = None, **headers: str) -> Page:
    async def pages(request: Request) -> Page:
        return SEEN

    answer: Any = asyncio.run(with_token(pages, TOKEN)(Request(path, query or {}, headers)))
    assert isinstance(answer, Page)
    return answer


@pytest.mark.parametrize(
    "path", ["/", "/metrics", "/page/app.js", "/api/state", "/api/live", "/nowhere"]
)
def test_without_the_token_no_page_is_shown(path: str) -> None:
    for headers in (
        {},
        {"authorization": "Bearer wrong"},
        {"authorization": f"Basic {TOKEN}"},
        {"authorization": TOKEN},
    ):
        assert ask(path, **headers).status is HTTPStatus.UNAUTHORIZED
    for cookie in (
        "fairfleet-token=wrong",
        "other=" + TOKEN,
        "fairfleet-token",
        "\x00=;;=",
        "fairfleet-token=é",
    ):
        assert ask(path, cookie=cookie).status is HTTPStatus.UNAUTHORIZED
    assert ask(path, {"token": TOKEN[:-1]}).status is HTTPStatus.UNAUTHORIZED
    assert ask(path, {"token": ""}).status is HTTPStatus.UNAUTHORIZED
    assert TOKEN.encode() not in ask(path).body


@pytest.mark.parametrize("path", ["/healthz", "/readyz"])
def test_probes_need_no_token(path: str) -> None:
    assert ask(path) == SEEN


def test_a_program_shows_it_in_a_header() -> None:
    assert ask(authorization=f"Bearer {TOKEN}") == SEEN
    assert ask(authorization=f"bearer  {TOKEN} ") == SEEN


@pytest.mark.parametrize(("path", "to"), [("/", "/"), ("//evil.example/x", "/evil.example/x")])
def test_a_browser_sends_the_token_once_and_is_redirected_without_it(path: str, to: str) -> None:
    sent = ask(path, {"token": TOKEN})
    assert (sent.status, sent.headers["Location"]) == (HTTPStatus.SEE_OTHER, to)
    cookie = sent.headers["Set-Cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=Strict" in cookie
    assert ask("/", cookie=f"a=b; {cookie.partition(';')[0]}") == SEEN


def test_a_token_can_lie_in_a_file_that_others_cannot_read(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(f"{TOKEN}\n")
    os.chmod(file, 0o600)
    assert read_token(ServerSettings(http={"token_file": file})) == TOKEN  # type: ignore[arg-type]
    os.chmod(file, 0o644)
    with pytest.raises(UsageError, match="mode 0644"):
        read_token(ServerSettings(http={"token_file": file}))  # type: ignore[arg-type]


def test_a_weak_token_is_refused_and_not_repeated() -> None:
    settings = ServerSettings(http={"token": "hunter2"})  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="at least 16") as caught:
        read_token(settings)
    assert "hunter2" not in str(caught.value)
    assert "hunter2" not in repr(settings)


@pytest.mark.parametrize(
    "listen", ["0.0.0.0:8440", "192.0.2.1:8440", "[::]:8440", "fleet.example:8440"]
)
def test_unencrypted_listening_beyond_loopback_is_refused_or_warned_about(
    listen: str, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(UsageError, match="unencrypted"):
        check_transport(ServerSettings(listen=listen))
    with caplog.at_level(logging.WARNING):
        check_transport(ServerSettings(listen=listen, insecure=True))
    assert "INSECURE" in caplog.text


@pytest.mark.parametrize("listen", ["127.0.0.1:0", "127.8.8.8:1", "[::1]:8440", "localhost:8440"])
def test_loopback_needs_no_tls(listen: str, caplog: pytest.LogCaptureFixture) -> None:
    check_transport(ServerSettings(listen=listen))
    assert not caplog.records
    assert ServerSettings().http.host == "127.0.0.1"
