"""A device's side of enrolment: it makes a key, and gets a certificate for it. The key stays here."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeVar

import grpc

from fairfleet.common.access import Access, handshake_words
from fairfleet.common.certificates import Pair, belong_together, certified, new_request
from fairfleet.common.credentials import Credentials
from fairfleet.common.enrolment_token import EnrolmentToken
from fairfleet.common.errors import Unreachable, UsageError, refusal, short
from fairfleet.common.identity import Identity, Role, is_name
from fairfleet.common.keepalive import CLIENT_OPTIONS
from fairfleet.proto.v1 import enrolment_pb2 as pb
from fairfleet.proto.v1.enrolment_pb2_grpc import EnrolmentStub

T = TypeVar("T")

ANSWER_SECONDS = 20.0
TRIES = 3  # over a bad link: a token is good for the same key again


def enrol(token: EnrolmentToken, server: str | None) -> Credentials:
    if not is_name(token.client):
        raise UsageError(f"the token is for {short(token.client)!r}, which is no client's name")
    who = Identity(Role.CLIENT, token.client)
    key, request = new_request(who)
    asked = pb.EnrolRequest(client=token.client, secret=token.secret, request=request)
    with grpc.secure_channel(token.enrolment, grpc.ssl_channel_credentials(token.ca), CLIENT_OPTIONS) as channel:
        stub = EnrolmentStub(channel)
        got = _answered(token.enrolment, lambda: stub.Enrol(asked, timeout=ANSWER_SECONDS)).certificate
    _check(got, key, who)
    return Credentials.of(server or token.server, token.ca, got, key)


def renew(path: Path, server: str | None) -> Credentials:
    """With a new key; the present credentials prove who asks."""
    access = Access(server, path)
    present = access.credentials
    assert present is not None
    key, request = new_request(present.identity)
    with access.channel(CLIENT_OPTIONS) as channel:
        stub, asked = EnrolmentStub(channel), pb.RenewRequest(request=request)
        got = _answered(access.address, lambda: stub.Renew(asked, timeout=ANSWER_SECONDS)).certificate
    _check(got, key, present.identity)
    return Credentials.of(present.address, present.ca, got, key)


def _check(certificate: bytes, key: bytes, who: Identity) -> None:
    """Before it takes the place of one that works."""
    if not belong_together(Pair(key, certificate)):
        raise UsageError("the server answered with something else than a certificate for the key that it was asked for")
    said = certified(certificate)
    if said.identity != who:
        raise UsageError(f"the server answered with a certificate of {said.identity}; asked was one of {who}")
    if said.ends <= datetime.now(UTC):
        raise UsageError(f"the server answered with a certificate that ended on {said.ends:%Y-%m-%d %H:%M} UTC")


def _answered(address: str, call: Callable[[], T]) -> T:
    for left in reversed(range(TRIES)):
        try:
            return call()
        except grpc.RpcError as error:
            code, details = error.code(), error.details() or "no details"
            if refused := refusal(code, details):
                raise refused from None
            if not left:
                said = handshake_words(details, True) or short(details.rsplit(": ", 1)[-1])
                raise Unreachable(f"no FairFleet server answers at {address} ({said})") from None
    raise AssertionError("the last try returns or raises")  # pragma: no cover
