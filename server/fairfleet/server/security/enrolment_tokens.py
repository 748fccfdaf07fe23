"""One-time tokens for devices that create their own key.

The database holds one token per client, as a digest only. Redeeming runs in the database's thread,
so a token can never be used with two keys.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from typing import NamedTuple

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from fairfleet.common.errors import NotAllowed
from fairfleet.server.storage.queries import ReadableStore, WritableStore, Write
from fairfleet.server.storage.schema import tokens

SECRET_BYTES = 32
# Compared with where a client has no token: response times must not show which clients have one.
NO_DIGEST = "0" * 64


class TokenValidity(NamedTuple):
    """When a token expires (Unix time), and how many seconds its certificate is valid."""

    expires_unix: float
    certificate_seconds: float


def make_token(store: WritableStore, client: str, validity: TokenValidity, *writes: Write) -> bytes:
    """Return the secret of a new token, which is stored nowhere; void the client's older token.

    Further `writes` are part of the transaction.
    """
    secret = secrets.token_bytes(SECRET_BYTES)
    row = {"client": client, "digest": digest_of(secret), **validity._asdict(), "used_by": None}

    def write(connection: Connection) -> None:
        """Replace the client's token."""
        connection.execute(tokens.delete().where(tokens.c.client == client))
        connection.execute(tokens.insert(), row)

    store.write(write, *writes)
    return secret


def digests(store: ReadableStore) -> dict[str, str]:
    """Return all digests by client: a wrong token is then recognised without a query."""
    return {
        row.client: row.digest for row in store.rows(sa.select(tokens.c.client, tokens.c.digest))
    }


def is_one(secret: bytes, digest: str | None) -> bool:
    """Return whether a secret matches a digest, in constant time even if there is no digest."""
    return hmac.compare_digest(digest_of(secret), digest or NO_DIGEST)


def redeem(store: WritableStore, client: str, secret: bytes, key: str, now: float) -> float:
    """Bind a token to a key (given as a digest); return the certificate's lifetime in seconds.

    Must run in the thread that writes to the database, so that two keys cannot use one token.
    Raises NotAllowed for a wrong, expired or used token.
    """
    rows = store.rows(sa.select(tokens).where(tokens.c.client == client))
    if not is_one(secret, rows[0].digest if rows else None):
        raise wrong(client)
    (token,) = rows
    if now >= token.expires_unix:
        raise NotAllowed(
            f"the token for client {client} has expired; get a new one from the operator"
        )
    if token.used_by not in (None, key):
        raise NotAllowed(
            f"the token for client {client} was used already, with another key. If this device "
            "did not use it, somebody else has the token: inform the operator, who can "
            f"`fairfleet revoke {client}`."
        )
    if token.used_by is None:
        store.write(_use(client, key))
    return float(token.certificate_seconds)


def _use(client: str, key: str) -> Write:
    def write(connection: Connection) -> None:
        connection.execute(tokens.update().where(tokens.c.client == client).values(used_by=key))

    return write


def wrong(client: str) -> NotAllowed:
    """Return the error for a token that is unknown or was replaced."""
    return NotAllowed(f"this token is not one for client {client}, or a newer one has replaced it")


def digest_of(secret: bytes) -> str:
    """Return the SHA-256 of a secret, in hex. Its 256 random bits cannot be guessed."""
    return hashlib.sha256(secret).hexdigest()
