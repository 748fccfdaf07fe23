"""One-time tokens for devices that make their own key: kept as digests, in the database, one per client."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from typing import NamedTuple

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from fairfleet.common.errors import NotAllowed
from fairfleet.server.facts import Facts, WritableFacts, Write
from fairfleet.server.schema import tokens

SECRET_BYTES = 32
NO_DIGEST = "0" * 64  # compared with where there is no token: an answer must not tell by its haste which names have one


class Terms(NamedTuple):
    expires_unix: float
    certificate_seconds: float


def make_token(store: WritableFacts, client: str, terms: Terms) -> bytes:
    """Its secret, which is nowhere else; an older token of the client is void."""
    secret = secrets.token_bytes(SECRET_BYTES)
    row = {"client": client, "digest": digest_of(secret), **terms._asdict(), "used_by": None}

    def write(connection: Connection) -> None:
        connection.execute(tokens.delete().where(tokens.c.client == client))
        connection.execute(tokens.insert(), row)

    store.write(write)
    return secret


def digests(store: Facts) -> dict[str, str]:
    """By client: enough to tell a wrong token at once, however many are sent."""
    return {row.client: row.digest for row in store.rows(sa.select(tokens.c.client, tokens.c.digest))}


def is_one(secret: bytes, digest: str | None) -> bool:
    """In the same time, whether there is a token for the client or not."""
    return hmac.compare_digest(digest_of(secret), digest or NO_DIGEST)


def redeem(store: WritableFacts, client: str, secret: bytes, key: str, now: float) -> float:
    """For how many seconds the certificate is to be valid; the token is this key's (a digest) from now on.

    In the thread that writes facts, so that no two keys can have it.
    """
    found = store.rows(sa.select(tokens).where(tokens.c.client == client))
    if not is_one(secret, found[0].digest if found else None):
        raise wrong(client)
    (token,) = found
    if now >= token.expires_unix:
        raise NotAllowed(f"the token for client {client} has expired; ask the operator for a new one")
    if token.used_by not in (None, key):
        raise NotAllowed(
            f"the token for client {client} was used already, with another key. If that was not this device, somebody "
            f"else has it: tell the operator, who can `fairfleet revoke {client}`."
        )
    if token.used_by is None:
        store.write(_use(client, key))
    return float(token.certificate_seconds)


def _use(client: str, key: str) -> Write:
    def write(connection: Connection) -> None:
        connection.execute(tokens.update().where(tokens.c.client == client).values(used_by=key))

    return write


def wrong(client: str) -> NotAllowed:
    return NotAllowed(f"this token is not one for client {client}, or a newer one has taken its place")


def digest_of(secret: bytes) -> str:
    return hashlib.sha256(secret).hexdigest()  # of 256 random bits: nothing that could be guessed
