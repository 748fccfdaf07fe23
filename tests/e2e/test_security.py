"""Strangers, thieves and members that overreach, against a real server: each is refused with the right code and words,
the server lives, and two honest clients beside them train on."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest

from fairfleet.common.certificates import Authority, new_authority, new_request
from fairfleet.common.credentials import Credentials
from fairfleet.common.identity import Identity
from fairfleet.proto.v1 import enrolment_pb2, operator_pb2
from fairfleet.proto.v1 import fleet_pb2 as pb
from fairfleet.proto.v1.operator_pb2_grpc import OperatorStub
from fairfleet.server.authorization import TABLE
from tests.e2e.device import REPORT, Device
from tests.e2e.fleet import OWN_CONNECTION, Fleet, free_port, until
from tests.e2e.scraping import get
from tests.e2e.secure import DAY, NOW, SecureFleet, client, operator
from tests.e2e.test_refusals import refused
from tests.server.test_authorization import every_call

Code = grpc.StatusCode


@pytest.fixture(scope="module")
def standing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecureFleet]:
    """One server that all attacks below are tried on; beside it two real clients, which train without end."""
    fleet = SecureFleet(tmp_path_factory.mktemp("secure"))
    fleet.init(1000)
    fleet.start_server(rounds=1_000_000, round__quorum=0.1, round__deadline_seconds=2, keep_models=2)
    for name in ("honest-1", "honest-2"):
        fleet.start_client(name, steps=1, step_seconds=0.2)
    fleet.wait_for_version(1)
    yield fleet
    assert fleet.server is not None
    assert fleet.server.poll() is None, fleet.log("server.log")
    assert "Traceback" not in fleet.log("server.log")
    fleet.end()


@pytest.fixture(autouse=True)
def _others_train_on(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "standing" in request.fixturenames:
        fleet: SecureFleet = request.getfixturevalue("standing")
        assert all(process.poll() is None for process in fleet.clients.values())
        fleet.wait_for_version(fleet.version() + 1)


@pytest.fixture
def own(tmp_path: Path) -> Iterator[SecureFleet]:
    fleet = SecureFleet(tmp_path)
    try:
        yield fleet
    finally:
        fleet.end()


# ---- not a member -----------------------------------------------------------------------------------


def none(fleet: SecureFleet) -> grpc.ChannelCredentials:
    return grpc.ssl_channel_credentials(fleet.ca)


def shown(fleet: SecureFleet, found: Credentials) -> grpc.ChannelCredentials:
    return grpc.ssl_channel_credentials(fleet.ca, found.key, found.certificate)


def of_another_ca(fleet: SecureFleet) -> grpc.ChannelCredentials:
    """Which even has the same name as ours."""
    pair = Authority.of(new_authority("CA of the tests")).member(client("ann"))
    return grpc.ssl_channel_credentials(fleet.ca, pair.key, pair.certificate)


def expired(fleet: SecureFleet) -> grpc.ChannelCredentials:
    return shown(fleet, fleet.credentials(client("ann"), 10 * DAY, NOW - 20 * DAY))


def not_yet_valid(fleet: SecureFleet) -> grpc.ChannelCredentials:
    return shown(fleet, fleet.credentials(client("ann"), 10 * DAY, NOW + 5 * DAY))


def the_servers_own(fleet: SecureFleet) -> grpc.ChannelCredentials:
    pair = fleet.authority.server(["localhost"])
    return grpc.ssl_channel_credentials(fleet.ca, pair.key, pair.certificate)


@pytest.mark.parametrize(
    ("who", "reason"),
    [
        (none, "PEER_DID_NOT_RETURN_A_CERTIFICATE"),
        (of_another_ca, "CERTIFICATE_VERIFY_FAILED"),
        (expired, "certificate has expired"),
        (not_yet_valid, "certificate is not yet valid"),
        (the_servers_own, "unsupported certificate purpose"),
    ],
)
def test_whoever_is_no_member_is_refused_in_the_handshake(
    standing: SecureFleet, who: Callable[[SecureFleet], grpc.ChannelCredentials], reason: str
) -> None:
    seen = standing.log("server.log").count(reason)
    with grpc.secure_channel(standing.address, who(standing), OWN_CONNECTION) as channel, refused(Code.UNAVAILABLE):
        Device("", "ann", channel).stub.Join(pb.JoinRequest(client="ann", protocol_version=1), timeout=10)
    until(lambda: standing.log("server.log").count(reason) > seen, f"{reason} in the server's log")


def test_a_server_of_another_ca_gets_nothing_to_hear(standing: SecureFleet) -> None:
    other = new_authority("other").certificate
    ann = standing.credentials(client("ann"))
    credentials = grpc.ssl_channel_credentials(other, ann.key, ann.certificate)
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


def test_clear_text_to_the_tls_port(standing: SecureFleet) -> None:
    with grpc.insecure_channel(standing.address, OWN_CONNECTION) as channel, refused(Code.UNAVAILABLE):
        Device("", "ann", channel).stub.Join(pb.JoinRequest(client="ann"), timeout=10)
    done = standing.run("status", "--server", standing.address)
    assert done.returncode == 6
    assert "wants TLS (then give --credentials)" in done.stderr


@pytest.mark.slow
def test_tls_to_a_clear_port(standing: SecureFleet, fleet: Fleet) -> None:
    fleet.init()
    fleet.start_server()
    file = str(standing.bundle(operator("operator")))
    done = standing.run("status", "--server", fleet.address, "--credentials", file)
    assert done.returncode == 6
    assert "speaks clear text, not TLS" in done.stderr
    assert fleet.status().connected == 0


def handshake(port: int, newest: ssl.TLSVersion) -> str:
    """The version that was agreed on, or the alert."""
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
def test_tls_1_1_is_refused_and_1_2_and_1_3_are_spoken(standing: SecureFleet) -> None:
    for port in (standing.port, standing.enrolment_port):
        seen = standing.log("server.log").count("UNSUPPORTED_PROTOCOL")
        assert "TLSv1" not in handshake(port, ssl.TLSVersion.TLSv1_1)
        until(lambda seen=seen: standing.log("server.log").count("UNSUPPORTED_PROTOCOL") > seen, "the server's reason")
        assert handshake(port, ssl.TLSVersion.TLSv1_3) == "TLSv1.3"
    assert handshake(standing.enrolment_port, ssl.TLSVersion.TLSv1_2) == "TLSv1.2"


CLIENT_HELLO = bytes.fromhex("16030100f5010000f10303")  # the beginning of one, and then nothing
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
def test_garbage_on_the_port(standing: SecureFleet, what: str) -> None:
    for port in (standing.port, standing.enrolment_port):
        with socket.create_connection(("127.0.0.1", port), 10) as stranger, contextlib.suppress(OSError):
            stranger.sendall(GARBAGE[what])
            stranger.shutdown(socket.SHUT_WR)
            while stranger.recv(65536):
                pass


# ---- members that overreach -----------------------------------------------------------------------------


def test_a_client_cannot_join_under_another_name(standing: SecureFleet) -> None:
    for other in ("honest-1", "operator", "ANN"):
        with refused(Code.PERMISSION_DENIED, "client ann cannot speak for another", f"join as {other}"):
            standing.device("ann").join(client=other)


def test_a_client_cannot_use_anothers_session(own: SecureFleet) -> None:
    own.init()
    own.start_server()
    ann, thief = own.device("ann"), own.device("thief")
    session = ann.join().session
    thief.join()
    calls: dict[str, Any] = {
        "NextTask": pb.NextTaskRequest(session=session),
        "OpenUpload": pb.OpenUploadRequest(session=session, report=REPORT),
        "ReportEvaluation": pb.ReportEvaluationRequest(session=session, failure="none of yours"),
        "ReportVerification": pb.ReportVerificationRequest(session=session, failure="none of yours"),
        "Heartbeat": pb.HeartbeatRequest(session=session, task="train/0/0/ann", failure="gives up"),
        "Leave": pb.LeaveRequest(session=session),
        "FetchModel": pb.FetchModelRequest(session=session),
    }
    with_session = {m.name for m in pb.DESCRIPTOR.services_by_name["Fleet"].methods} - {"Join", "SendUpload"}
    assert with_session == set(calls)
    for method, request in calls.items():
        with refused(Code.PERMISSION_DENIED, "client thief cannot speak for another", "session is another client's"):
            answer = getattr(thief.stub, method)(request, timeout=10)
            list(answer if method == "FetchModel" else ())
    announced = pb.OpenUploadRequest(session=session, report=REPORT).SerializeToString()
    with refused(Code.PERMISSION_DENIED, "session is another client's"):
        thief.open_and_send(announced, [])
    assert own.status().connected == 2
    ann.train_task()  # its session was not touched


@pytest.mark.slow
def test_a_client_cannot_send_into_anothers_upload_nor_send_it_again(own: SecureFleet) -> None:
    own.init(600_000)
    own.start_server(rounds=2)
    ann, thief = own.device("ann"), own.device("thief")
    ann.join()
    thief.join()
    ann.train_task()
    thief.train_task()
    chunks, encoded = ann.encode()
    upload = ann.open(encoded).upload
    with refused(Code.PERMISSION_DENIED, "the upload is another client's"):
        thief.send(upload, chunks)
    first = ann.send(upload, chunks)
    assert first.outcome == pb.OUTCOME_COUNTED
    for sender, code in ((thief, Code.FAILED_PRECONDITION), (ann, Code.FAILED_PRECONDITION)):
        with refused(code, "not open"):  # a replay finds nothing to write to, whoever sends it
            sender.send(upload, chunks)
    assert ann.open(encoded).receipt == first
    assert own.query("select count(*) from updates where client = 'ann'") == [(1,)]


def test_every_call_by_every_role(own: SecureFleet) -> None:
    """With an empty message each: the table decides before anything is looked at."""
    own.init()
    own.start_server()
    channels = {
        "client": own.channel_of(own.credentials(client("operator"))),  # whose name gives it no right
        "operator": own.channel_of(own.credentials(operator("ann"))),
        "nobody": own.enrolment_channel(),
    }
    allowed = {role: {method for method in every_call() if call_freely(channels[role], method)} for role in channels}
    for role, found in allowed.items():
        assert found == {method for method in every_call() if role in TABLE[method]}, role
    with refused(Code.UNIMPLEMENTED):
        channels["client"].unary_unary("/fairfleet.v1.Fleet/Anything")(b"", timeout=10)


def call_freely(channel: grpc.Channel, method: str) -> bool:
    """Whether anything but a refusal for one's role comes."""
    call = channel.stream_stream(method)(iter([b""]), timeout=2)
    try:
        next(call, None)
    except grpc.RpcError as error:
        if error.code() is Code.PERMISSION_DENIED and "needs a certificate of" in error.details():
            return False
        return error.code() is not Code.UNIMPLEMENTED
    finally:
        call.cancel()
    return True


def test_a_certificate_that_ends_is_refused_on_an_open_connection(standing: SecureFleet) -> None:
    ann = standing.device("short-lived", ttl=timedelta(seconds=4))
    ann.join()
    with refused(Code.PERMISSION_DENIED, "the certificate of client short-lived ended on"):
        for _ in range(1000):
            ann.stub.Heartbeat(pb.HeartbeatRequest(session=ann.session), timeout=10)
            time.sleep(0.05)


# ---- revocation -----------------------------------------------------------------------------------------


def in_background(call: Callable[[], Any]) -> Callable[[], Any]:
    """Starts it; the answer, or the error, when it is asked for."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(call())
        except grpc.RpcError as error:
            found.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()

    def result() -> Any:
        thread.join(30)
        assert found, "the call goes on and on"
        if isinstance(found[0], grpc.RpcError):
            raise found[0]
        return found[0]

    return result


def slowly(chunks: list[Any], sent: threading.Event) -> Iterator[Any]:
    """All but the last, which never comes."""
    yield from chunks[:-1]
    sent.set()
    threading.Event().wait(60)


@pytest.mark.parametrize("kind", ["tls", pytest.param("clear", marks=pytest.mark.slow)])
def test_a_revocation_ends_what_is_under_way(tmp_path: Path, kind: str) -> None:
    """An upload, a download and a poll; the others go on, and who was revoked does not come back."""
    fleet = SecureFleet(tmp_path) if kind == "tls" else Fleet(tmp_path)
    try:
        fleet.init(4_000_000)
        fleet.start_server(round__minimum_clients=2, round__clients=2, lease_seconds=60)
        names = ("sends", "honest", "fetches", "waits")
        devices = {
            name: fleet.device(name) if isinstance(fleet, SecureFleet) else Device(fleet.address, name)
            for name in names
        }
        for device in devices.values():
            device.join()
            if device.name == "honest":  # the first two are asked; the others have nothing to do
                devices["sends"].train_task()
                device.train_task()
        polling = in_background(devices["waits"].next_task)
        chunks, encoded = devices["sends"].encode()
        upload, sent = devices["sends"].open(encoded).upload, threading.Event()
        sending = in_background(lambda: devices["sends"].send(upload, slowly(chunks, sent)))
        request = pb.FetchModelRequest(session=devices["fetches"].session)
        model = devices["fetches"].stub.FetchModel(request, timeout=60)
        fetched = len(next(model).data)
        assert sent.wait(30)

        operators = fleet.operator()
        for name in ("sends", "fetches", "waits"):
            operators.Revoke(operator_pb2.RevokeRequest(client=name, reason="stolen"), timeout=20)
        with refused(Code.PERMISSION_DENIED, "client sends was revoked: stolen"):
            sending()
        with refused(Code.PERMISSION_DENIED, "client fetches was revoked: stolen"):
            for chunk in model:
                fetched += len(chunk.data)
        assert fetched < 4 * 4_000_000
        if kind == "tls":
            with refused(Code.PERMISSION_DENIED, "client waits was revoked: stolen"):
                polling()
        else:  # it is told to join again, and then that it cannot
            with refused(Code.UNAUTHENTICATED):
                polling()
        for name in ("sends", "fetches", "waits"):
            again = fleet.device(name) if isinstance(fleet, SecureFleet) else devices[name]
            with refused(Code.PERMISSION_DENIED, f"client {name} was revoked"):
                again.join()
        chunks, encoded = devices["honest"].encode()
        receipt = devices["honest"].send(devices["honest"].open(encoded).upload, chunks)
        assert receipt.outcome == pb.OUTCOME_COUNTED
        assert "Traceback" not in fleet.log("server.log")
    finally:
        fleet.end()


@pytest.mark.slow
def test_a_revoked_operators_watch_ends_and_its_certificate_is_worth_nothing(own: SecureFleet) -> None:
    own.init()
    own.start_server()
    lost = OperatorStub(own.channel_of(own.credentials(operator("night-shift"))))
    watching = lost.Watch(operator_pb2.WatchRequest(), timeout=60)
    watching.initial_metadata()
    kept = own.operator()
    others = kept.Watch(operator_pb2.WatchRequest(), timeout=120)
    others.initial_metadata()
    file = str(own.bundle(operator("operator")))
    done = own.run("revoke", "--operator", "night-shift", "--reason", "lost", "--credentials", file)
    assert done.returncode == 0, done.stderr
    with refused(Code.PERMISSION_DENIED, "operator night-shift was revoked: lost"):
        next(watching)
    with refused(Code.PERMISSION_DENIED, "operator night-shift was revoked: lost"):
        lost.Stop(operator_pb2.StopRequest(), timeout=10)
    own.kill_server()
    own.start_server()
    again = OperatorStub(own.channel_of(own.credentials(operator("night-shift"))))  # even with a new certificate
    with refused(Code.PERMISSION_DENIED, "operator night-shift was revoked: lost"):
        again.Pause(operator_pb2.PauseRequest(), timeout=10, wait_for_ready=True)
    own.device("night-shift").join(protocol_version=1)  # a client of that name is somebody else
    with refused(Code.UNAVAILABLE):  # the server was killed; until then the other one watched
        list(others)


# ---- tokens ---------------------------------------------------------------------------------------------


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


def test_a_member_can_renew_itself_and_nobody_else(standing: SecureFleet) -> None:
    from fairfleet.proto.v1.enrolment_pb2_grpc import EnrolmentStub

    stub = EnrolmentStub(standing.channel_of(standing.credentials(client("ann"))))
    for other in (client("honest-1"), operator("ann")):
        request = enrolment_pb2.RenewRequest(request=new_request(other)[1])
        with refused(Code.PERMISSION_DENIED, "client ann can renew its own certificate"):
            stub.Renew(request, timeout=20)
    key, request_bytes = new_request(client("ann"))
    got = stub.Renew(enrolment_pb2.RenewRequest(request=request_bytes), timeout=20).certificate
    renewed = Credentials.of(standing.address, standing.ca, got, key)
    assert abs(renewed.ends - standing.credentials(client("ann")).ends) < timedelta(minutes=5)  # no longer than before
    device = Device("", "ann", standing.channel_of(renewed))
    device.join()
    device.leave()


# ---- renewal while everything runs ------------------------------------------------------------------------


def serial(fleet: SecureFleet, port: int) -> bytes:
    context = ssl.create_default_context(cadata=fleet.ca.decode())
    context.set_alpn_protocols(["h2"])
    raw = socket.create_connection(("127.0.0.1", port), 10)
    with raw, context.wrap_socket(raw, server_hostname="localhost") as wrapped:
        return wrapped.getpeercert(binary_form=True) or b""


def test_the_servers_certificate_is_rotated_without_a_break(standing: SecureFleet) -> None:
    watching = standing.operator().Watch(operator_pb2.WatchRequest(), timeout=120)
    first = next(watching).sequence
    pids = {name: process.pid for name, process in standing.clients.items()}
    ports = (standing.port, standing.enrolment_port)
    before = [serial(standing, port) for port in ports]
    pair = standing.authority.server(["localhost", "127.0.0.1"])
    (standing.pki / "server.key").write_bytes(pair.key)  # half of it: the key is not the certificate's
    assert [serial(standing, port) for port in ports] == before
    assert "server.key is not the key of server.crt" in standing.log("server.log")
    standing.give_server(pair)
    after = [serial(standing, port) for port in ports]
    assert after == [ssl.PEM_cert_to_DER_cert(pair.certificate.decode())] * 2
    late = standing.device("late")
    late.join()
    late.leave()
    events = [next(watching).sequence for _ in range(20)]  # the connection from before
    assert events == list(range(first + 1, first + 21))
    assert {name: process.pid for name, process in standing.clients.items()} == pids
    assert "took up the renewed certificate" in standing.log("server.log")


def test_a_running_client_takes_up_its_renewed_credentials(standing: SecureFleet) -> None:
    file = standing.bundle(client("honest-2"))
    before = file.read_bytes()
    done = standing.run("renew", str(file), "--server", standing.address)
    assert done.returncode == 0, done.stderr
    assert file.read_bytes() != before
    assert file.stat().st_mode & 0o777 == 0o600
    until(lambda: "took up the renewed credentials" in standing.log("honest-2.log"), "the client to notice")
    took = "select count(*) from updates where client = 'honest-2'"
    count = standing.query(took)
    until(lambda: standing.query(took) > count, "its next update")


@pytest.mark.slow
def test_a_client_whose_credentials_end_while_nobody_answers_says_so_and_ends(own: SecureFleet) -> None:
    own.bundle(client("ann"), ttl=timedelta(seconds=8))
    ann = own.start_client("ann")  # there is no server to tell it
    assert ann.wait(60) == 2, own.log("ann.log")
    assert "the certificate of client ann ended on" in own.log("ann.log")


# ---- the HTTP endpoint ---------------------------------------------------------------------------------


def test_a_server_with_a_token_shows_strangers_only_that_it_lives(fleet: Fleet) -> None:
    fleet.init()
    port, token = free_port(), "http-token-0123456789"
    fleet.start_server(http__port=port, http__token=token)
    url = f"http://127.0.0.1:{port}"
    assert get(f"{url}/healthz")[0] == get(f"{url}/readyz")[0] == 200
    for path in ("/", "/metrics", "/events"):
        assert get(url + path)[0] == 401
        assert get(url + path, Authorization=f"Bearer {token}0")[0] == 401
    for path in ("/", "/metrics"):
        assert get(url + path, Authorization=f"Bearer {token}")[0] == 200


# ---- by hand: the commands ----------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_commands_from_a_ca_to_a_client_that_trains(fleet: Fleet) -> None:
    """And no secret of theirs is in any log or on any screen but where it belongs."""
    folder, http = fleet.folder, "http-token-0123456789"
    pki, bundle = str(folder / "pki"), str(folder / "ann.fleet")

    def done(*words: str) -> subprocess.CompletedProcess[str]:
        found = fleet.run(*words)
        assert found.returncode == 0, found.stderr
        return found

    told = [done("pki", "init", "localhost", "--pki", pki, "--address", fleet.address)]
    told.append(done("enroll", "ann", "--pki", pki, "--output", bundle, "--ttl", "2d"))
    fleet.init()
    fleet.start_server(rounds=2, pki=pki, enrolment="127.0.0.1:0", http__token=http)
    olga = f"{pki}/operator.fleet"
    made = done("token", "bob", "--credentials", olga, "--certificate-ttl", "12h")
    own = str(folder / "bob.fleet")
    told.append(done("enroll", "--token", made.stdout.strip(), "--output", own))
    told.append(done("renew", own.removesuffix(".fleet")))
    told.append(done("status", "--credentials", olga))
    told.append(done("health", "--server", fleet.address, "--credentials", olga))
    for name, file in (("ann", bundle), ("bob", own)):
        words = ["client", "--verbose", "--task", "tasks:shift", "-o", "size=1000", "-o", "shift=1", "-o", "samples=10"]
        words += ["--credentials", file, "--state-dir", str(folder / "clients")]
        fleet.clients[name] = fleet._start(words, f"{name}.log")
    assert fleet.wait_clients() == {"ann": 0, "bob": 0}, fleet.log("ann.log")
    assert {client for (client,) in fleet.query("select distinct client from updates")} == {"ann", "bob"}
    wrong = fleet.run("client", "--task", "tasks:shift", "--credentials", bundle, "--name", "bob")
    assert (wrong.returncode, "these credentials are of client ann, not of --name bob" in wrong.stderr) == (2, True)
    wrong = fleet.run("client", "--task", "tasks:shift", "--credentials", olga)
    assert (wrong.returncode, "is the credential of operator operator" in wrong.stderr) == (2, True)
    os.chmod(bundle, 0o644)
    wrong = fleet.run("client", "--task", "tasks:shift", "--credentials", bundle)
    assert (wrong.returncode, "mode 0644" in wrong.stderr) == (2, True)

    said = "".join(f"{one.stdout}{one.stderr}" for one in told) + made.stderr + wrong.stderr
    said += "".join(file.read_text() for file in folder.glob("*.log"))
    keys = [folder / "pki" / "ca.key", folder / "pki" / "server.key", *folder.glob("**/*.fleet")]
    secrets = [line for file in keys for line in private_lines(file.read_text())]
    assert len(secrets) >= 5
    parts = made.stdout.strip().split(".")
    for secret in (*secrets, http, parts[2], "PRIVATE KEY"):
        assert secret not in said
    assert "serving" in said or "joined" in said  # there is something in the logs


def private_lines(text: str) -> list[str]:
    lines = text.replace("\\n", "\n").splitlines()
    begins = [place for place, line in enumerate(lines) if "BEGIN PRIVATE KEY" in line]
    return [lines[place + 1] for place in begins]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["server", "--listen", "0.0.0.0:0"], "--insecure"),
        (["server", "--enrolment", "127.0.0.1:0"], "needs --pki"),
        (["server", "--pki", "nowhere"], "fairfleet pki init"),
        (["client", "--task", "tasks:shift", "-o", "size=3", "--server", "192.0.2.1:8440"], "--credentials"),
        (["status", "--server", "192.0.2.1:8440"], "--insecure"),
        (["status", "--credentials", "nowhere.fleet"], "No such file"),
        (["enroll"], "NAME"),
        (["enroll", "a/b"], "1 to 64"),
        (["enroll", "ann", "--pki", "nowhere"], "fairfleet pki init"),
        (["enroll", "ann", "--ttl", "forever"], "for example 90d"),
        (["enroll", "--token", "fft1.x"], "no token"),
        (["enroll", "ann", "--token", "fft1.x"], "leave NAME"),
    ],
)
def test_mistakes_are_said_before_anything_is_done(tmp_path: Path, words: list[str], message: str) -> None:
    fleet = Fleet(tmp_path)
    if words[0] == "server":
        words = [*words, "--model", str(fleet.init()), "--state-dir", str(tmp_path / "state"), "--set", "http.port=0"]
    done = fleet.run(*words)
    assert done.returncode == 2, done.stderr
    assert message in done.stderr
    assert "Traceback" not in done.stderr
