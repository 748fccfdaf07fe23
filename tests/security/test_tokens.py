"""A token is valid for one name, one key and a limited time; a wrong token is refused."""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import time
from typing import Any

import grpc
import pytest

from fairfleet.common.pki.certificates import new_request
from fairfleet.common.pki.credentials import Credentials
from fairfleet.common.pki.identity import Identity
from fairfleet.proto.v1 import enrolment_pb2, operator_pb2
from fairfleet.proto.v1.enrolment_pb2_grpc import EnrolmentStub
from tests.support.device import Device
from tests.support.fleet import free_port, until
from tests.support.refusals import refused
from tests.support.scraping import scrape, series
from tests.support.secure import SecureFleet, client, operator

Code = grpc.StatusCode


def token_for(fleet: SecureFleet, name: str, seconds: float = 600.0) -> bytes:
    """Return the secret of a new token for a client."""
    request = operator_pb2.MakeTokenRequest(client=name, seconds=seconds, certificate_seconds=3600)
    return bytes(fleet.operator().MakeToken(request, timeout=20).secret)


def redeem(fleet: SecureFleet, name: str, secret: bytes, request: bytes | None = None) -> bytes:
    """Return the certificate for a token, by default with a new key."""
    request = new_request(client(name))[1] if request is None else request
    enrolment = enrolment_pb2.EnrolRequest(client=name, secret=secret, request=request)
    return bytes(
        fleet.enrolment_stub().Enrol(enrolment, timeout=20, wait_for_ready=True).certificate
    )


@pytest.mark.slow
def test_a_token_is_valid_for_one_key_and_survives_a_restart(own: SecureFleet) -> None:
    own.init()
    own.start_server()
    secret = token_for(own, "carl")
    own.kill_server()
    own.start_server()
    key, request = new_request(client("carl"))
    for _ in range(2):  # a lost answer is requested again
        certificate = redeem(own, "carl", secret, request)
    carl = Credentials.of(own.address, own.ca, certificate, key)
    assert Device("", "carl", own.channel_of(carl)).join().session
    own.kill_server()
    own.start_server()
    with refused(
        Code.PERMISSION_DENIED, "was used already, with another key", "fairfleet revoke carl"
    ):
        redeem(own, "carl", secret)
    (stored,) = own.query("select * from tokens")
    assert secret.hex() not in str(stored)
    own.operator().Revoke(operator_pb2.RevokeRequest(client="carl"), timeout=20)
    with refused(Code.PERMISSION_DENIED, "client carl was revoked"):
        redeem(own, "carl", secret, request)
    with refused(Code.PERMISSION_DENIED, "client carl was revoked"):
        token_for(own, "carl")


def test_forged_replaced_and_expired_tokens_are_refused(standing: SecureFleet) -> None:
    secret = token_for(standing, "dora")
    forged = bytes([secret[0] ^ 1]) + secret[1:]
    for name, given in (
        ("dora", forged),
        ("dora", b""),
        ("dora", secret[:-1]),
        ("nobody", secret),
        ("honest-1", secret),
    ):
        with refused(Code.PERMISSION_DENIED, f"not one for client {name}"):
            redeem(standing, name, given)
    token_for(standing, "dora")
    with refused(Code.PERMISSION_DENIED, "a newer one has replaced it"):
        redeem(standing, "dora", secret)
    began, brief = time.time(), token_for(standing, "dora", seconds=0.05)
    until(lambda: time.time() > began + 1, "its end")
    with refused(Code.PERMISSION_DENIED, "the token for client dora has expired"):
        redeem(standing, "dora", brief)


@pytest.mark.parametrize("identity", [client("honest-1"), operator("dora"), operator("operator")])
def test_a_certificate_request_for_another_identity_is_refused(
    standing: SecureFleet, identity: Identity
) -> None:
    secret = token_for(standing, "dora")
    with refused(
        Code.PERMISSION_DENIED,
        "the token is for client dora",
        f"the certificate request is for {identity}",
    ):
        redeem(standing, "dora", secret, new_request(identity)[1])
    assert redeem(standing, "dora", secret)  # the refused request did not use up the token


@pytest.mark.parametrize("request_bytes", [b"", b"\x30\x82", os.urandom(300), bytes(9000)])
def test_a_malformed_certificate_request_is_refused(
    standing: SecureFleet, request_bytes: bytes
) -> None:
    with refused(Code.INVALID_ARGUMENT, "certificate request"):
        redeem(standing, "dora", token_for(standing, "dora"), request_bytes)


@pytest.mark.slow
def test_a_server_without_the_ca_key_makes_no_tokens_and_signs_nothing(own: SecureFleet) -> None:
    (own.pki / "ca.key").unlink()
    own.init()
    own.start_server()
    with refused(Code.FAILED_PRECONDITION, "holds no CA key", "fairfleet enroll"):
        token_for(own, "carl")
    with refused(Code.FAILED_PRECONDITION, "holds no CA key"):
        redeem(own, "carl", bytes(32))
    file = str(own.credentials_file(client("ann")))
    done = own.run("renew", file)
    assert done.returncode == 4
    assert "holds no CA key" in done.stderr


# ---- floods --------------------------------------------------------------------------------


def test_a_flood_of_wrong_tokens_is_not_logged_and_a_right_token_is_accepted(
    own: SecureFleet,
) -> None:
    """The right token may come from the same address: routers are shared with honest devices."""
    http = free_port()
    own.init()
    own.start_server(limits__enrolments_per_minute=5, http__port=http)
    secret, stranger = token_for(own, "carl"), own.enrolment_stub()
    request = new_request(client("carl"))[1]
    wrong = enrolment_pb2.EnrolRequest(client="carl", secret=bytes(32), request=request)
    answers = list[Any]()
    for _ in range(100):
        with pytest.raises(grpc.RpcError) as error:
            stranger.Enrol(wrong, timeout=20, wait_for_ready=True)
        answers.append(error.value)
    assert [answer.code() for answer in answers[:5]] == [Code.PERMISSION_DENIED] * 5
    limited = [answer for answer in answers if answer.code() is Code.RESOURCE_EXHAUSTED]
    assert len(limited) > 50  # five a minute are checked, however slow this machine is
    for answer in limited:
        assert "127.0.0.1 sent wrong tokens more than 5 times a minute" in answer.details()
        assert "fairfleet-retry-seconds" in {entry.key for entry in answer.trailing_metadata()}
    assert scrape(http)[series("fairfleet_refused_total", reason="enrolments")] == len(limited)
    assert own.log("server.log").count("refused to enroll client carl") == 100 - len(limited)
    assert redeem(own, "carl", secret, request)
    with refused(
        Code.RESOURCE_EXHAUSTED, "client carl requested a certificate more than 5 times a minute"
    ):
        for _ in range(20):  # certificates are not signed endlessly either
            redeem(own, "carl", secret, request)
    ann = EnrolmentStub(own.channel_of(own.credentials(client("ann"))))
    renewal = enrolment_pb2.RenewRequest(request=new_request(client("ann"))[1])
    with refused(
        Code.RESOURCE_EXHAUSTED, "client ann requested a certificate more than 5 times a minute"
    ):
        for _ in range(20):
            ann.Renew(renewal, timeout=20)


@pytest.mark.slow
def test_connections_to_the_port_for_tokens_are_limited_and_end_when_silent(
    own: SecureFleet,
) -> None:
    own.init()
    own.start_server(limits__enrolment_connections=5, limits__handshake_seconds=2)
    context = ssl.create_default_context(cadata=own.ca.decode())
    context.set_alpn_protocols(["h2"])
    connections = list[ssl.SSLSocket]()
    with contextlib.ExitStack() as stack:
        for _ in range(20):
            with contextlib.suppress(OSError):
                raw = stack.enter_context(
                    socket.create_connection(("127.0.0.1", own.enrolment_port), 10)
                )
                connections.append(
                    stack.enter_context(context.wrap_socket(raw, server_hostname="localhost"))
                )
        assert len(connections) <= 5
        for connection in connections:
            connection.settimeout(30)
            # The server sends its settings, and after some silence a GOAWAY and the end.
            while connection.recv(4096):
                pass
    assert redeem(own, "carl", token_for(own, "carl"))
