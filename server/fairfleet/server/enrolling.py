"""Certificates for devices that make their own key: for a one-time token, or for a certificate that is valid still.

Only where the server holds the CA's key, which is its owner's choice (`enrolment` in the settings).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any

from fairfleet.common.certificates import BACKDATED, Authority, Certified, key_digest, read_request
from fairfleet.common.errors import BadRequest, NotAllowed, WrongState, short
from fairfleet.common.identity import Identity, Role, is_name
from fairfleet.server import tokens
from fairfleet.server.facts import WritableFacts
from fairfleet.server.gate import Gate
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
        ca: Callable[[], bytes],
        gate: Gate,
    ) -> None:
        self._store, self._in_database, self._refuse_revoked = store, in_database, refuse_revoked
        self._authority, self._ca, self._gate = authority, ca, gate
        self._digests = tokens.digests(store) if authority else {}  # of tokens, by client: as in the database
        self.port: int | None = None  # where devices without a certificate are heard

    async def make_token(self, client: str, seconds: float, certificate_seconds: float) -> tuple[bytes, bytes]:
        """The secret, and the certificate of the CA; of two, while one takes the other's place."""
        self._signing()
        if self.port is None:
            raise WrongState("this server has no port for tokens: start it with --enrolment host:port")
        if not is_name(client):
            raise BadRequest(f"client name {short(client)!r} is not 1 to 64 of a-z A-Z 0-9 . _ -")
        if not 0 < seconds <= LONGEST_TOKEN_SECONDS or not 0 < certificate_seconds <= LONGEST_CERTIFICATE_SECONDS:
            raise BadRequest("a token lasts up to 30 days, a certificate up to 10 years")
        self._refuse_revoked(Identity(Role.CLIENT, client))
        terms = Terms(time.time() + seconds, certificate_seconds)
        secret: bytes = await self._in_database(tokens.make_token, self._store, client, terms)
        self._digests[client] = tokens.digest_of(secret)
        log.info("made a token for client %s, good for %.0f s", client, seconds, extra={"client": client})
        return secret, self._ca()

    async def enrol(self, client: str, secret: bytes, request: bytes, peer: str) -> bytes:
        authority = self._signing()
        if not is_name(client):
            raise BadRequest(f"client name {short(client)!r} is not 1 to 64 of a-z A-Z 0-9 . _ -")
        who, now = Identity(Role.CLIENT, client), asyncio.get_running_loop().time()
        right = tokens.is_one(secret, self._digests.get(client))
        if right:
            self._gate.certificates.take(str(who), now)
        else:
            self._gate.strangers.sent_wrong_token(peer, now)
        try:
            if not right:
                raise tokens.wrong(client)
            asked, key = read_request(request)
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
        authority = self._signing()
        self._gate.certificates.take(str(present.identity), asyncio.get_running_loop().time())
        asked, key = read_request(request)
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
