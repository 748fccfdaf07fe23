"""Peers without a valid certificate, old TLS, clear text and garbage fail in the handshake."""

from __future__ import annotations

import contextlib
import random
import socket
import ssl
from collections.abc import Callable

import grpc
import pytest

from fairfleet.common.pki.certificates import Authority, new_authority
from fairfleet.common.pki.credentials import Credentials
from fairfleet.proto.v1 import fleet_pb2 as pb
from tests.support.device import Device
from tests.support.fleet import OWN_CONNECTION, Fleet, until
from tests.support.refusals import refused
from tests.support.secure import DAY, NOW, SecureFleet, client, operator

Code = grpc.StatusCode


def without_certificate(fleet: SecureFleet) -> grpc.ChannelCredentials:
    """Show no certificate at all."""
    return grpc.ssl_channel_credentials(fleet.ca)


def channel_credentials(fleet: SecureFleet, member: Credentials) -> grpc.ChannelCredentials:
    """Return gRPC's form of these credentials."""
    return grpc.ssl_channel_credentials(fleet.ca, member.key, member.certificate)


def of_another_ca(fleet: SecureFleet) -> grpc.ChannelCredentials:
    """Show a certificate of another CA with the same name as ours."""
    pair = Authority.of(new_authority("CA of the tests")).member(client("ann"))
    return grpc.ssl_channel_credentials(fleet.ca, pair.key, pair.certificate)


def expired(fleet: SecureFleet) -> grpc.ChannelCredentials:
    """Show a certificate that expired ten days ago."""
    return channel_credentials(fleet, fleet.credentials(client("ann"), 10 * DAY, NOW - 20 * DAY))


def not_yet_valid(fleet: SecureFleet) -> grpc.ChannelCredentials:
    """Show a certificate that becomes valid in five days."""
    return channel_credentials(fleet, fleet.credentials(client("ann"), 10 * DAY, NOW + 5 * DAY))


def server_certificate(fleet: SecureFleet) -> grpc.ChannelCredentials:
    """Show a certificate that was made for a server."""
    pair = fleet.authority.server(["localhost"])
    return grpc.ssl_channel_credentials(fleet.ca, pair.key, pair.certificate)


@pytest.mark.parametrize(
    ("who", "reason"),
    [
        (without_certificate, "PEER_DID_NOT_RETURN_A_CERTIFICATE"),
        (of_another_ca, "CERTIFICATE_VERIFY_FAILED"),
        (expired, "certificate has expired"),
        (not_yet_valid, "certificate is not yet valid"),
        (server_certificate, "unsupported certificate purpose"),
    ],
)
def test_a_peer_without_a_valid_certificate_is_refused_in_the_handshake(
    standing: SecureFleet, who: Callable[[SecureFleet], grpc.ChannelCredentials], reason: str
) -> None:
    seen = standing.log("server.log").count(reason)
    with (
        grpc.secure_channel(standing.address, who(standing), OWN_CONNECTION) as channel,
        refused(Code.UNAVAILABLE),
    ):
        Device("", "ann", channel).stub.Join(
            pb.JoinRequest(client="ann", protocol_version=1), timeout=10
        )
    until(lambda: standing.log("server.log").count(reason) > seen, f"{reason} in the server's log")


def test_a_client_sends_nothing_to_a_server_of_another_ca(standing: SecureFleet) -> None:
    other_ca = new_authority("other").certificate
    ann = standing.credentials(client("ann"))
    credentials = grpc.ssl_channel_credentials(other_ca, ann.key, ann.certificate)
    other_channel = grpc.secure_channel(standing.address, credentials, OWN_CONNECTION)
    with other_channel as channel, refused(Code.UNAVAILABLE, "CERTIFICATE_VERIFY_FAILED"):
        Device("", "ann", channel).stub.Join(pb.JoinRequest(client="ann"), timeout=10)


@pytest.mark.slow
def test_a_member_cannot_pose_as_the_server(own: SecureFleet) -> None:
    own.init()
    own.give_server(own.authority.member(client("localhost")))
    own.start_server()
    with refused(Code.UNAVAILABLE, "CERTIFICATE_VERIFY_FAILED"):
        own.device("ann").stub.Join(pb.JoinRequest(client="ann"), timeout=10)


def test_clear_text_to_the_tls_port_is_refused_and_explained(standing: SecureFleet) -> None:
    with (
        grpc.insecure_channel(standing.address, OWN_CONNECTION) as channel,
        refused(Code.UNAVAILABLE),
    ):
        Device("", "ann", channel).stub.Join(pb.JoinRequest(client="ann"), timeout=10)
    done = standing.run("status", "--server", standing.address)
    assert done.returncode == 6
    assert "the server there uses TLS" in done.stderr
    assert "give --credentials NAME.fleet" in done.stderr


@pytest.mark.slow
def test_tls_to_an_unencrypted_port_is_explained(standing: SecureFleet, fleet: Fleet) -> None:
    fleet.init()
    fleet.start_server()
    file = str(standing.credentials_file(operator("operator")))
    done = standing.run("status", "--server", fleet.address, "--credentials", file)
    assert done.returncode == 6
    assert "does not use TLS" in done.stderr
    assert fleet.status().connected == 0


def handshake(port: int, newest: ssl.TLSVersion) -> str:
    """Return the TLS version that was negotiated, or the alert."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.minimum_version, context.maximum_version = ssl.TLSVersion.TLSv1, newest
    context.set_ciphers("ALL:@SECLEVEL=0")
    context.set_alpn_protocols(["h2"])
    with socket.create_connection(("127.0.0.1", port), 10) as raw:
        try:
            with context.wrap_socket(raw) as wrapped:
                return str(wrapped.version())
        except ssl.SSLError as error:
            return str(error.reason)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tls_1_1_is_refused_and_1_2_and_1_3_are_accepted(standing: SecureFleet) -> None:
    for port in (standing.port, standing.enrolment_port):
        seen = standing.log("server.log").count("UNSUPPORTED_PROTOCOL")
        assert "TLSv1" not in handshake(port, ssl.TLSVersion.TLSv1_1)
        until(
            lambda seen=seen: standing.log("server.log").count("UNSUPPORTED_PROTOCOL") > seen,
            "the server's reason",
        )
        assert handshake(port, ssl.TLSVersion.TLSv1_3) == "TLSv1.3"
    assert handshake(standing.enrolment_port, ssl.TLSVersion.TLSv1_2) == "TLSv1.2"


CLIENT_HELLO = bytes.fromhex("16030100f5010000f10303")  # the first bytes of one only
GARBAGE = {
    "noise": random.Random(9).randbytes(65536),
    "zeros": bytes(65536),
    "http": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "preface": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(4096),
    "torn hello": CLIENT_HELLO,
    "huge record": b"\x16\x03\x01\xff\xff" + bytes(65535),
    "alert": b"\x15\x03\x01\x00\x02\x02\x28",
    "nothing": b"",
}


@pytest.mark.parametrize("what", GARBAGE)
def test_garbage_on_the_port_does_no_harm(standing: SecureFleet, what: str) -> None:
    for port in (standing.port, standing.enrolment_port):
        with (
            socket.create_connection(("127.0.0.1", port), 10) as connection,
            contextlib.suppress(OSError),
        ):
            connection.sendall(GARBAGE[what])
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(65536):
                pass
