"""A device's side of enrolment: it creates a key and obtains a certificate for it.

The private key never leaves the device. A certificate is checked before it replaces another one.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeVar

import grpc

from fairfleet.common.errors import Unreachable, UsageError, refusal, short
from fairfleet.common.names import check_name
from fairfleet.common.net.channel_options import CLIENT_OPTIONS
from fairfleet.common.net.server_access import ServerAccess, handshake_words
from fairfleet.common.pki.certificates import KeyPair, belong_together, certified, new_request
from fairfleet.common.pki.credentials import Credentials
from fairfleet.common.pki.enrolment_token import EnrolmentToken
from fairfleet.common.pki.identity import Identity, Role
from fairfleet.proto.v1 import enrolment_pb2 as pb
from fairfleet.proto.v1.enrolment_pb2_grpc import EnrolmentStub

T = TypeVar("T")

ANSWER_SECONDS = 20.0
TRIES = 3  # for a bad connection; a token stays valid for the same key


def enrol(token: EnrolmentToken, server: str | None) -> Credentials:
    """Return credentials for the client that the token names.

    `server` overrides the server's address in the token. Raises UsageError for a token or an
    answer that cannot be used, Unreachable if no server answers, and the server's refusal.
    """
    client = check_name(token.client, "the client name in the token", UsageError)
    identity = Identity(Role.CLIENT, client)
    key, signing_request = new_request(identity)
    request = pb.EnrolRequest(client=client, secret=token.secret, request=signing_request)
    with grpc.secure_channel(
        token.enrolment, grpc.ssl_channel_credentials(token.ca), CLIENT_OPTIONS
    ) as channel:
        stub = EnrolmentStub(channel)
        response = _call(token.enrolment, lambda: stub.Enrol(request, timeout=ANSWER_SECONDS))
    _check(response.certificate, key, identity)
    return Credentials.of(server or token.server, token.ca, response.certificate, key)


def renew(path: Path, server: str | None) -> Credentials:
    """Return renewed credentials with a new key; the present ones authenticate the request.

    Raises the same errors as `enrol`.
    """
    access = ServerAccess(server, path)
    present = access.credentials
    assert present is not None
    key, signing_request = new_request(present.identity)
    request = pb.RenewRequest(request=signing_request)
    with access.channel(CLIENT_OPTIONS) as channel:
        stub = EnrolmentStub(channel)
        response = _call(access.address, lambda: stub.Renew(request, timeout=ANSWER_SECONDS))
    _check(response.certificate, key, present.identity)
    return Credentials.of(present.address, present.ca, response.certificate, key)


def _check(certificate: bytes, key: bytes, identity: Identity) -> None:
    """Check a new certificate before it replaces one that works."""
    if not belong_together(KeyPair(key, certificate)):
        raise UsageError(
            "the server answered with something other than a certificate for the requested key"
        )
    contents = certified(certificate)
    if contents.identity != identity:
        raise UsageError(
            f"the server answered with a certificate of {contents.identity}; "
            f"requested was one of {identity}"
        )
    if contents.ends <= datetime.now(UTC):
        raise UsageError(
            "the server answered with a certificate that expired on "
            f"{contents.ends:%Y-%m-%d %H:%M} UTC"
        )


def _call(address: str, call: Callable[[], T]) -> T:
    """Return the server's answer, after up to TRIES attempts."""
    for tries_left in reversed(range(TRIES)):
        try:
            return call()
        except grpc.RpcError as error:
            code, details = error.code(), error.details() or "no details"
            if refused := refusal(code, details):
                raise refused from None
            if not tries_left:
                reason = handshake_words(details, True) or short(details.rsplit(": ", 1)[-1])
                raise Unreachable(f"no FairFleet server answers at {address} ({reason})") from None
    raise AssertionError("the last try returns or raises")  # pragma: no cover
