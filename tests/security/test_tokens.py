"""A token is good for one name, one key and its time; whoever has none gets nothing."""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import time
from typing import Any

import grpc
import pytest

from fairfleet.common.certificates import new_request
from fairfleet.common.credentials import Credentials
from fairfleet.common.identity import Identity
from fairfleet.proto.v1 import enrolment_pb2, operator_pb2
from fairfleet.proto.v1.enrolment_pb2_grpc import EnrolmentStub
from tests.e2e.device import Device
from tests.e2e.fleet import free_port, until
from tests.e2e.scraping import scrape, series
from tests.e2e.secure import SecureFleet, client, operator
from tests.e2e.test_refusals import refused

Code = grpc.StatusCode


def token_for(fleet: SecureFleet, name: str, seconds: float = 600.0) -> bytes:
    request = operator_pb2.MakeTokenRequest(client=name, seconds=seconds, certificate_seconds=3600)
    return bytes(fleet.operator().MakeToken(request, timeout=20).secret)


def redeem(fleet: SecureFleet, name: str, secret: bytes, request: bytes | None = None) -> bytes:
    request = new_request(client(name))[1] if request is None else request
    asked = enrolment_pb2.EnrolRequest(client=name, secret=secret, request=request)
    return bytes(fleet.stranger().Enrol(asked, timeout=20, wait_for_ready=True).certificate)


@pytest.mark.slow
def test_a_token_is_good_for_one_key_and_over_a_restart(own: SecureFleet) -> None:
    own.init()
    own.start_server()
    secret = token_for(own, "carl")
    own.kill_server()
    own.start_server()
    key, request = new_request(client("carl"))
    for _ in range(2):  # an answer that was lost is asked for again
        certificate = redeem(own, "carl", secret, request)
    carl = Credentials.of(own.address, own.ca, certificate, key)
    assert Device("", "carl", own.channel_of(carl)).join().session
    own.kill_server()
    own.start_server()
    with refused(Code.PERMISSION_DENIED, "was used already, with another key", "fairfleet revoke carl"):
        redeem(own, "carl", secret)
    (stored,) = own.query("select * from tokens")
    assert secret.hex() not in str(stored)
    own.operator().Revoke(operator_pb2.RevokeRequest(client="carl"), timeout=20)
    with refused(Code.PERMISSION_DENIED, "client carl was revoked"):
        redeem(own, "carl", secret, request)
    with refused(Code.PERMISSION_DENIED, "client carl was revoked"):
        token_for(own, "carl")


def test_tokens_that_are_not_good(standing: SecureFleet) -> None:
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
    with refused(Code.PERMISSION_DENIED, "a newer one has taken its place"):
        redeem(standing, "dora", secret)
    began, brief = time.time(), token_for(standing, "dora", seconds=0.05)
    until(lambda: time.time() > began + 1, "its end")
    with refused(Code.PERMISSION_DENIED, "the token for client dora has expired"):
        redeem(standing, "dora", brief)


@pytest.mark.parametrize("other", [client("honest-1"), operator("dora"), operator("operator")])
def test_a_request_for_another_identity_than_the_tokens(standing: SecureFleet, other: Identity) -> None:
    secret = token_for(standing, "dora")
    with refused(Code.PERMISSION_DENIED, "the token is for client dora", f"the certificate request is for {other}"):
        redeem(standing, "dora", secret, new_request(other)[1])
    assert redeem(standing, "dora", secret)  # which did not use it up


@pytest.mark.parametrize("request_bytes", [b"", b"\x30\x82", os.urandom(300), bytes(9000)])
def test_a_request_that_is_none(standing: SecureFleet, request_bytes: bytes) -> None:
    with refused(Code.INVALID_ARGUMENT, "certificate request"):
        redeem(standing, "dora", token_for(standing, "dora"), request_bytes)


@pytest.mark.slow
def test_without_the_cas_key_no_token_is_made_and_nothing_is_signed(own: SecureFleet) -> None:
    (own.pki / "ca.key").unlink()
    own.init()
    own.start_server()
    with refused(Code.FAILED_PRECONDITION, "holds no CA key", "fairfleet enroll"):
        token_for(own, "carl")
    with refused(Code.FAILED_PRECONDITION, "holds no CA key"):
        redeem(own, "carl", bytes(32))
    file = str(own.bundle(client("ann")))
    done = own.run("renew", file)
    assert done.returncode == 4
    assert "holds no CA key" in done.stderr


# ---- without end -------------------------------------------------------------------------------


def test_wrong_tokens_without_end_are_neither_looked_at_nor_logged_and_a_right_one_is_heard(own: SecureFleet) -> None:
    """Also from the same address: behind a router there may be an honest device beside the one that floods."""
    http = free_port()
    own.init()
    own.start_server(limits__enrolments_per_minute=5, http__port=http)
    secret, stranger = token_for(own, "carl"), own.stranger()
    request = new_request(client("carl"))[1]
    wrong = enrolment_pb2.EnrolRequest(client="carl", secret=bytes(32), request=request)
    answers = list[Any]()
    for _ in range(100):
        with pytest.raises(grpc.RpcError) as error:
            stranger.Enrol(wrong, timeout=20, wait_for_ready=True)
        answers.append(error.value)
    assert [answer.code() for answer in answers[:5]] == [Code.PERMISSION_DENIED] * 5
    limited = [answer for answer in answers if answer.code() is Code.RESOURCE_EXHAUSTED]
    assert len(limited) > 50  # however slow this machine is: five a minute are looked at
    for answer in limited:
        assert "127.0.0.1 sent wrong tokens more than 5 times a minute" in answer.details()
        assert "fairfleet-retry-seconds" in {one.key for one in answer.trailing_metadata()}
    assert scrape(http)[series("fairfleet_refused_total", reason="enrolments")] == len(limited)
    assert own.log("server.log").count("refused to enrol client carl") == 100 - len(limited)
    assert redeem(own, "carl", secret, request)
    with refused(Code.RESOURCE_EXHAUSTED, "client carl asked for a certificate more than 5 times a minute"):
        for _ in range(20):  # nor is it signed for without end
            redeem(own, "carl", secret, request)
    ann = EnrolmentStub(own.channel_of(own.credentials(client("ann"))))
    renewal = enrolment_pb2.RenewRequest(request=new_request(client("ann"))[1])
    with refused(Code.RESOURCE_EXHAUSTED, "client ann asked for a certificate more than 5 times a minute"):
        for _ in range(20):
            ann.Renew(renewal, timeout=20)


def test_strangers_hold_only_so_many_connections_to_the_port_for_tokens(own: SecureFleet) -> None:
    own.init()
    own.start_server(limits__enrolment_connections=5, limits__handshake_seconds=2)
    context = ssl.create_default_context(cadata=own.ca.decode())
    context.set_alpn_protocols(["h2"])
    held = list[ssl.SSLSocket]()
    with contextlib.ExitStack() as stack:
        for _ in range(20):
            with contextlib.suppress(OSError):
                raw = stack.enter_context(socket.create_connection(("127.0.0.1", own.enrolment_port), 10))
                held.append(stack.enter_context(context.wrap_socket(raw, server_hostname="localhost")))
        assert len(held) <= 5
        for one in held:
            one.settimeout(30)
            while one.recv(4096):  # settings, and after a while of silence a GOAWAY and the end
                pass
    assert redeem(own, "carl", token_for(own, "carl"))
