"""A token for the HTTP endpoint: round the function that answers every request.

Programs send `Authorization: Bearer …`. A browser opens `/?token=…` once, gets a cookie and is sent on to an address
without the token, so that it stays out of history and bookmarks. Probes of health need none: they tell nothing.
"""

from __future__ import annotations

import hmac
from http import HTTPStatus
from http.cookies import CookieError, SimpleCookie

from fairfleet.server.http_endpoint import Answer, Page, Pages, Request

OPEN = frozenset({"/healthz", "/readyz"})
COOKIE = "fairfleet-token"
SHORTEST = 16
REFUSAL = Page(
    HTTPStatus.UNAUTHORIZED,
    b"this needs a token: send the header Authorization: Bearer TOKEN, or open /?token=TOKEN in a browser\n",
    headers={"WWW-Authenticate": 'Bearer realm="fairfleet"', "Cache-Control": "no-store"},
)


def with_token(pages: Pages, token: str) -> Pages:
    """Answers only whoever has the token."""
    expected = token.encode()

    def known(given: str | None) -> bool:
        return given is not None and hmac.compare_digest(given.encode(errors="surrogateescape"), expected)

    async def answer(request: Request) -> Answer:
        if request.path in OPEN or known(_bearer(request)) or known(_cookie(request)):
            return await pages(request)
        if known(request.query.get("token")):
            return _sent_on(request.path, token)
        return REFUSAL

    return answer


def _bearer(request: Request) -> str | None:
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    return given.strip() if scheme.lower() == "bearer" else None


def _cookie(request: Request) -> str | None:
    try:
        found = SimpleCookie(request.headers.get("cookie", "")).get(COOKIE)
    except CookieError:
        return None
    return found.value if found else None


def _sent_on(path: str, token: str) -> Page:
    cookie: SimpleCookie = SimpleCookie({COOKIE: token})
    cookie[COOKIE].update({"httponly": "yes", "samesite": "Strict", "path": "/"})
    headers = {
        "Location": f"/{path.lstrip('/')}",
        "Set-Cookie": cookie[COOKIE].OutputString(),
        "Cache-Control": "no-store",
    }
    return Page(HTTPStatus.SEE_OTHER, b"", headers=headers | {"Referrer-Policy": "no-referrer"})
