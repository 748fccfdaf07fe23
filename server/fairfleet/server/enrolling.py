"""Certificates for devices that make their own key: for a one-time token, or for a certificate that is valid still.

Only where the server holds the CA's key, which is its owner's choice (`enrolment` in the settings).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any

from fairfleet.common.certificates import BACKDATED, Authority, Certified, key_digest, pem, read_request
from fairfleet.common.errors import BadRequest, NotAllowed, WrongState, short
from fairfleet.common.identity import Identity, Role, is_name
from fairfleet.server import tokens
from fairfleet.server.facts import WritableFacts
from fairfleet.server.tokens import Terms

log = logging.getLogger(__name__)

LONGEST_TOKEN_SECONDS = 30 * 86400.0
LONGEST_CERTIFICATE_SECONDS = 3650 * 86400.0


class Enrolling:
    def __init__(
        self,
        store: WritableFacts,
        in_database: Callable[..., Awaitable[Any]],
        refuse_revoked: Callable[[Identity], None],
        authority: Authority | None,
    ) -> None:
        self._store, self._in_database, self._refuse_revoked = store, in_database, refuse_revoked
        self._authority = authority
        self.port: int | None = None  # where devices without a certificate are heard

    async def make_token(self, client: str, seconds: float, certificate_seconds: float) -> tuple[bytes, bytes]:
        """The secret, and the certificate of the CA."""
        authority = self._signing()
        if self.port is None:
            raise WrongState("this server has no port for tokens: start it with --enrolment host:port")
        if not is_name(client):
            raise BadRequest(f"client name {short(client)!r} is not 1 to 64 of a-z A-Z 0-9 . _ -")
        if not 0 < seconds <= LONGEST_TOKEN_SECONDS or not 0 < certificate_seconds <= LONGEST_CERTIFICATE_SECONDS:
            raise BadRequest("a token lasts up to 30 days, a certificate up to 10 years")
        self._refuse_revoked(Identity(Role.CLIENT, client))
        terms = Terms(time.time() + seconds, certificate_seconds)
        secret = await self._in_database(tokens.make_token, self._store, client, terms)
        log.info("made a token for client %s, good for %.0f s", client, seconds, extra={"client": client})
        return secret, pem(authority.certificate)

    async def enrol(self, client: str, secret: bytes, request: bytes) -> bytes:
        authority = self._signing()
        if not is_name(client):
            raise BadRequest(f"client name {short(client)!r} is not 1 to 64 of a-z A-Z 0-9 . _ -")
        who, (asked, key) = Identity(Role.CLIENT, client), read_request(request)
        try:
            if asked != who:
                raise NotAllowed(f"the token is for {who}; the certificate request is for {asked}")
            self._refuse_revoked(who)
            digest = key_digest(key)
            seconds = await self._in_database(tokens.redeem, self._store, client, secret, digest, time.time())
        except NotAllowed as error:
            log.warning("refused to enrol client %s: %s", client, error, extra={"client": client})
            raise
        log.info("client %s is enrolled with a key of its own", client, extra={"client": client})
        return authority.certify(who, key, timedelta(seconds=seconds))

    def renew(self, present: Certified, request: bytes) -> bytes:
        """For as long again as the present certificate was made for."""
        authority, (asked, key) = self._signing(), read_request(request)
        if asked != present.identity:
            raise NotAllowed(f"{present.identity} can renew its own certificate; the request is for {asked}")
        log.info("renewed the certificate of %s", present.identity)
        return authority.certify(present.identity, key, present.ends - present.begins - BACKDATED)

    def _signing(self) -> Authority:
        if self._authority is None:
            raise WrongState(
                "this server signs no certificates: it holds no CA key. Start it with --enrolment host:port and "
                "ca.key in the --pki folder, or use `fairfleet enroll` where the CA is."
            )
        return self._authority
