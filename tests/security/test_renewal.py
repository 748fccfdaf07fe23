"""Certificates are renewed while server and clients run."""

from __future__ import annotations

import socket
import ssl
from datetime import timedelta

import grpc
import pytest

from fairfleet.common.pki.certificates import Authority, new_authority, new_request
from fairfleet.common.pki.credentials import Credentials
from fairfleet.common.pki.private_files import write_private
from fairfleet.proto.v1 import enrolment_pb2, operator_pb2
from fairfleet.proto.v1 import fleet_pb2 as pb
from fairfleet.proto.v1.enrolment_pb2_grpc import EnrolmentStub
from tests.support.device import Device
from tests.support.fleet import until
from tests.support.refusals import refused
from tests.support.secure import SecureFleet, client, operator

Code = grpc.StatusCode


def test_a_member_can_renew_only_its_own_certificate(standing: SecureFleet) -> None:
    stub = EnrolmentStub(standing.channel_of(standing.credentials(client("ann"))))
    for identity in (client("honest-1"), operator("ann")):
        request = enrolment_pb2.RenewRequest(request=new_request(identity)[1])
        with refused(Code.PERMISSION_DENIED, "client ann can renew its own certificate"):
            stub.Renew(request, timeout=20)
    key, request_bytes = new_request(client("ann"))
    certificate = stub.Renew(
        enrolment_pb2.RenewRequest(request=request_bytes), timeout=20
    ).certificate
    renewed = Credentials.of(standing.address, standing.ca, certificate, key)
    # The renewed certificate is not valid for longer than the one before.
    ends = standing.credentials(client("ann")).ends
    assert abs(renewed.ends - ends) < timedelta(minutes=5)
    device = Device("", "ann", standing.channel_of(renewed))
    device.join()
    device.leave()


def served_certificate(fleet: SecureFleet, port: int) -> bytes:
    """Return the certificate that the server shows to a new connection."""
    context = ssl.create_default_context(cadata=fleet.ca.decode())
    context.set_alpn_protocols(["h2"])
    raw = socket.create_connection(("127.0.0.1", port), 10)
    with raw, context.wrap_socket(raw, server_hostname="localhost") as wrapped:
        return wrapped.getpeercert(binary_form=True) or b""


def test_the_server_certificate_is_rotated_without_interruption(standing: SecureFleet) -> None:
    watching = standing.operator().Watch(operator_pb2.WatchRequest(), timeout=120)
    first = next(watching).sequence
    pids = {name: process.pid for name, process in standing.clients.items()}
    ports = (standing.port, standing.enrolment_port)
    before = [served_certificate(standing, port) for port in ports]
    pair = standing.authority.server(["localhost", "127.0.0.1"])
    # Only half of the new pair is there: the key does not belong to the certificate.
    (standing.pki / "server.key").write_bytes(pair.key)
    assert [served_certificate(standing, port) for port in ports] == before
    assert "server.key is not the key of server.crt" in standing.log("server.log")
    standing.give_server(pair)
    after = [served_certificate(standing, port) for port in ports]
    assert after == [ssl.PEM_cert_to_DER_cert(pair.certificate.decode())] * 2
    late = standing.device("late")
    late.join()
    late.leave()
    events = [next(watching).sequence for _ in range(20)]  # over the connection opened before
    assert events == list(range(first + 1, first + 21))
    assert {name: process.pid for name, process in standing.clients.items()} == pids
    assert "loaded the renewed certificate" in standing.log("server.log")


def test_a_running_client_loads_its_renewed_credentials(standing: SecureFleet) -> None:
    file = standing.credentials_file(client("honest-2"))
    before = file.read_bytes()
    done = standing.run("renew", str(file), "--server", standing.address)
    assert done.returncode == 0, done.stderr
    assert file.read_bytes() != before
    assert file.stat().st_mode & 0o777 == 0o600
    until(
        lambda: "took up the renewed credentials" in standing.log("honest-2.log"),
        "the client to notice",
    )
    query = "select count(*) from updates where client = 'honest-2'"
    count = standing.query(query)
    until(lambda: standing.query(query) > count, "its next update")


@pytest.mark.slow
def test_a_client_whose_credentials_expire_without_a_server_says_so_and_ends(
    own: SecureFleet,
) -> None:
    own.credentials_file(client("ann"), ttl=timedelta(seconds=8))
    ann = own.start_client("ann")  # there is no server that could report it
    assert ann.wait(60) == 2, own.log("ann.log")
    assert "the certificate of client ann expired on" in own.log("ann.log")


def test_a_client_renews_its_certificate_before_it_expires(own: SecureFleet) -> None:
    """Certificates are backdated by an hour, so one for 20 minutes starts in its last third."""
    own.init()
    file = own.credentials_file(client("ann"), ttl=timedelta(minutes=20))
    before = file.read_bytes()
    own.start_server(round__minimum_clients=1, rounds=1_000_000)
    own.start_client("ann", step_seconds=0.05)
    until(lambda: "renewed the certificate of client ann" in own.log("ann.log"), "it to be renewed")
    until(lambda: "took up the renewed credentials" in own.log("ann.log"), "it to be taken up")
    assert file.read_bytes() != before
    assert file.stat().st_mode & 0o777 == 0o600
    own.wait_for_version(own.version() + 2)


@pytest.mark.slow
def test_a_client_that_cannot_renew_says_so_and_keeps_training(own: SecureFleet) -> None:
    own.init()
    (own.pki / "ca.key").unlink()
    own.credentials_file(client("ann"), ttl=timedelta(seconds=30))
    own.start_server(round__minimum_clients=1, rounds=1_000_000)
    own.start_client("ann", step_seconds=0.05)
    until(
        lambda: "is not renewed: this server signs no certificates" in own.log("ann.log"),
        "the message",
    )
    own.wait_for_version(own.version() + 2)


@pytest.mark.slow
def test_a_ca_is_replaced_without_interruption(own: SecureFleet) -> None:
    """Both CAs are trusted while one replaces the other, as docs/how-to/security.md says."""
    own.init()
    own.start_server(rounds=1_000_000)
    for name in ("ann", "bob"):
        own.start_client(name, step_seconds=0.05)
    own.wait_for_version(1)
    old, new = own.ca, new_authority("CA of the tests, the next")
    both = new.certificate + old
    write_private(own.pki / "ca.crt", both)
    late = own.device("late")  # has a certificate of the old CA and trusts no other CA
    late.join()
    late.leave()  # otherwise rounds would wait for it
    newer = Authority.of(new)
    for name in ("ann", "bob"):  # a certificate of the new CA, and both CAs trusted
        pair = newer.member(client(name))
        Credentials.of(own.address, both, pair.certificate, pair.key).save(
            own.credentials_file(client(name))
        )
        until(lambda name=name: "took up the renewed credentials" in own.log(f"{name}.log"), name)
    token = own.operator().MakeToken(
        operator_pb2.MakeTokenRequest(client="carl", seconds=60, certificate_seconds=60), timeout=20
    )
    assert token.ca == both  # a device that enrolls now trusts both as well
    own.give_server(newer.server(["localhost", "127.0.0.1"]))
    own.wait_for_version(own.version() + 2)
    write_private(own.pki / "ca.crt", new.certificate)
    stale = own.authority.member(client("stale"))
    trusts_both = own.channel_of(Credentials.of(own.address, both, stale.certificate, stale.key))
    with refused(Code.UNAVAILABLE):
        Device("", "stale", trusts_both).stub.Join(pb.JoinRequest(client="stale"), timeout=10)
    pair = newer.member(client("dora"))
    dora = Credentials.of(own.address, new.certificate, pair.certificate, pair.key)
    device = Device("", "dora", own.channel_of(dora))
    device.join()
    device.leave()
    own.wait_for_version(own.version() + 2)
    assert all(process.poll() is None for process in own.clients.values())
