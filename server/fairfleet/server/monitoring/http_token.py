"""A token for the HTTP endpoint: a wrapper of its page function.

Programs send `Authorization: Bearer …`. A browser opens `/?token=…` once, gets a cookie, and is
redirected to the address without the token, so that the token stays out of history and bookmarks.
Health probes need no token: their answers reveal nothing.
"""

from __future__ import annotations

import hmac
import logging
from http import HTTPStatus
from http.cookies import CookieError, SimpleCookie

from fairfleet.common.errors import UsageError
from fairfleet.common.net.addresses import is_loopback
from fairfleet.common.pki.private_files import read_private
from fairfleet.server.monitoring.http_endpoint import Answer, Page, Pages, Request
from fairfleet.server.settings import ServerSettings

log = logging.getLogger(__name__)

OPEN_PATHS = frozenset({"/healthz", "/readyz"})
COOKIE = "fairfleet-token"
MIN_CHARACTERS = 16
UNAUTHORIZED = Page(
    HTTPStatus.UNAUTHORIZED,
    b"this needs a token: send the header Authorization: Bearer TOKEN, "
    b"or open /?token=TOKEN in a browser\n",
    headers={"WWW-Authenticate": 'Bearer realm="fairfleet"', "Cache-Control": "no-store"},
)


def read_token(settings: ServerSettings) -> str | None:
    """Return the token that callers must send, if one is set.

    Logs a warning if other machines can reach the endpoint. Raises UsageError for a weak token.
    """
    token = _configured_token(settings)
    if not is_loopback(f"{settings.http.host}:{settings.http_port}"):
        exposure = (
            "with a token, which is sent unencrypted"
            if token
            else "to everybody who reaches it (see http.token)"
        )
        log.warning("metrics and page on %s are shown %s", settings.http.host, exposure)
    return token


def _configured_token(settings: ServerSettings) -> str | None:
    secret, file = settings.http.token, settings.http.token_file
    if secret is not None and file is not None:
        raise UsageError("give http.token or http.token_file, not both")
    token = secret.get_secret_value() if secret else None
    if file is not None:
        token = read_private(file, "the token for HTTP").decode(errors="replace").strip()
    if token is not None and not _is_strong(token):
        raise UsageError(
            f"the token for HTTP must have at least {MIN_CHARACTERS} printable ASCII characters, "
            f"found {len(token)} characters; make one with `openssl rand -hex 16`"
        )
    return token


def _is_strong(token: str) -> bool:
    return len(token) >= MIN_CHARACTERS and token.isascii() and token.isprintable()


def with_token(pages: Pages, token: str) -> Pages:
    """Answer only requests that carry the token."""
    expected = token.encode()

    def is_right(candidate: str | None) -> bool:
        return candidate is not None and hmac.compare_digest(
            candidate.encode(errors="surrogateescape"), expected
        )

    async def answer(request: Request) -> Answer:
        is_open = request.path in OPEN_PATHS
        if is_open or is_right(_bearer(request)) or is_right(_cookie(request)):
            return await pages(request)
        if is_right(request.query.get("token")):
            return _redirect(request.path, token)
        return UNAUTHORIZED

    return answer


def _bearer(request: Request) -> str | None:
    scheme, _, credentials = request.headers.get("authorization", "").partition(" ")
    return credentials.strip() if scheme.lower() == "bearer" else None


def _cookie(request: Request) -> str | None:
    try:
        morsel = SimpleCookie(request.headers.get("cookie", "")).get(COOKIE)
    except CookieError:
        return None
    return morsel.value if morsel else None


def _redirect(path: str, token: str) -> Page:
    """Return a redirect that sets the cookie and drops the query; it stays on this server."""
    cookie: SimpleCookie = SimpleCookie({COOKIE: token})
    cookie[COOKIE].update({"httponly": "yes", "samesite": "Strict", "path": "/"})
    headers = {
        "Location": f"/{path.lstrip('/')}",
        "Set-Cookie": cookie[COOKIE].OutputString(),
        "Cache-Control": "no-store",
        "Referrer-Policy": "no-referrer",
    }
    return Page(HTTPStatus.SEE_OTHER, b"", headers=headers)
