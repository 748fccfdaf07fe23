"""Certificates for devices that create their own key.

A device gets one for a one-time token, or in exchange for a certificate that is still valid. This
works only where the server holds the CA's key, which its owner decides (`enrolment` in the
settings).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any

from fairfleet.common.errors import BadRequest, NotAllowed, WrongState
from fairfleet.common.names import check_name
from fairfleet.common.pki.certificates import (
    BACKDATED,
    Authority,
    CertificateInfo,
    key_digest,
    read_request,
)
from fairfleet.common.pki.identity import Identity, Role
from fairfleet.server.security import enrolment_tokens
from fairfleet.server.security.enrolment_tokens import TokenValidity
from fairfleet.server.security.request_limits import RequestLimits
from fairfleet.server.storage.queries import WritableStore, Write

log = logging.getLogger(__name__)

LONGEST_TOKEN_SECONDS = 30 * 86400.0
LONGEST_CERTIFICATE_SECONDS = 3650 * 86400.0


class EnrolmentAuthority:
    """Issues enrolment tokens, and signs certificates for clients that show one."""

    def __init__(
        self,
        store: WritableStore,
        in_database: Callable[..., Awaitable[Any]],
        refuse_revoked: Callable[[Identity], None],
        authority: Authority | None,
        ca: Callable[[], bytes],
        limits: RequestLimits,
    ) -> None:
        """Without an `authority` (the CA's key) every request is refused with WrongState.

        `ca` returns the current CA certificate, and `in_database` runs a function in the
        database's thread.
        """
        self._store, self._in_database, self._refuse_revoked = store, in_database, refuse_revoked
        self._authority, self._ca, self._limits = authority, ca, limits
        # Digests of tokens by client: the same as in the database.
        self._digests = enrolment_tokens.digests(store) if authority else {}
        self.port: int | None = None  # where devices without a certificate may connect

    async def make_token(
        self, client: str, seconds: float, certificate_seconds: float, *writes: Write
    ) -> tuple[bytes, bytes]:
        """Return the secret of a new token, and the CA's certificate.

        Further `writes` are part of the transaction that stores the token's digest. While one CA
        replaces another, the second value holds both certificates.
        """
        self._signing_authority()
        if self.port is None:
            raise WrongState(
                "this server has no port for tokens: start it with --enrolment host:port"
            )
        check_name(client, "client name", BadRequest)
        _check_durations(seconds, certificate_seconds)
        self._refuse_revoked(Identity(Role.CLIENT, client))
        validity = TokenValidity(time.time() + seconds, certificate_seconds)
        secret: bytes = await self._in_database(
            enrolment_tokens.make_token, self._store, client, validity, *writes
        )
        self._digests[client] = enrolment_tokens.digest_of(secret)
        log.info(
            "made a token for client %s, valid for %.0f s",
            client,
            seconds,
            extra={"client": client},
        )
        return secret, self._ca()

    async def enrol(self, client: str, secret: bytes, request: bytes, peer: str) -> bytes:
        """Redeem a token: return a certificate for the key in the certificate request.

        Raises NotAllowed for a wrong, expired or used token, and LimitReached for too many
        requests. `peer` is the caller's address as gRPC writes it.
        """
        authority = self._signing_authority()
        check_name(client, "client name", BadRequest)
        who = Identity(Role.CLIENT, client)
        is_valid = enrolment_tokens.is_one(secret, self._digests.get(client))
        self._count_request(who, peer, is_valid)
        try:
            if not is_valid:
                raise enrolment_tokens.wrong(client)
            requested, key = read_request(request)
            if requested != who:
                raise NotAllowed(
                    f"the token is for {who}; the certificate request is for {requested}"
                )
            self._refuse_revoked(who)
            seconds = await self._in_database(
                enrolment_tokens.redeem, self._store, client, secret, key_digest(key), time.time()
            )
        except NotAllowed as error:
            log.warning("refused to enroll client %s: %s", client, error, extra={"client": client})
            raise
        log.info("enrolled client %s with its own key", client, extra={"client": client})
        return authority.certify(who, key, timedelta(seconds=seconds))

    def renew(self, present: CertificateInfo, request: bytes) -> bytes:
        """Return a new certificate, valid for as long as the present one was when it was made."""
        authority = self._signing_authority()
        self._limits.certificates.take(str(present.identity), asyncio.get_running_loop().time())
        requested, key = read_request(request)
        if requested != present.identity:
            raise NotAllowed(
                f"{present.identity} can renew its own certificate; the request is for {requested}"
            )
        log.info("renewed the certificate of %s", present.identity)
        return authority.certify(present.identity, key, present.ends - present.begins - BACKDATED)

    def _count_request(self, who: Identity, peer: str, is_valid: bool) -> None:
        """Count a request by client if its token is right, and by address if it is wrong."""
        now = asyncio.get_running_loop().time()
        if is_valid:
            self._limits.certificates.take(str(who), now)
        else:
            self._limits.wrong_tokens.sent_wrong_token(peer, now)

    def _signing_authority(self) -> Authority:
        if self._authority is None:
            raise WrongState(
                "this server signs no certificates: it holds no CA key. Start it with "
                "--enrolment host:port and ca.key in the --pki folder, or use `fairfleet enroll` "
                "where the CA is."
            )
        return self._authority


def _check_durations(seconds: float, certificate_seconds: float) -> None:
    if (
        not 0 < seconds <= LONGEST_TOKEN_SECONDS
        or not 0 < certificate_seconds <= LONGEST_CERTIFICATE_SECONDS
    ):
        raise BadRequest(
            f"found a token lifetime of {seconds:g} s and a certificate lifetime of "
            f"{certificate_seconds:g} s; a token lasts up to 30 days, a certificate up to 10 years"
        )
