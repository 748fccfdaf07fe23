"""Credentials: what a certificate says, and what becomes of a file that is not as it should be."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa

from fairfleet.common.access import Access
from fairfleet.common.certificates import Authority, Pair, certified, new_authority, new_request, read_request
from fairfleet.common.credentials import Credentials, read_credentials
from fairfleet.common.durations import duration
from fairfleet.common.enrolment_token import EnrolmentToken, read_token
from fairfleet.common.errors import BadRequest, UsageError
from fairfleet.common.identity import NOBODY, Identity, Role
from fairfleet.common.pki_folder import PkiFolder

ANN = Identity(Role.CLIENT, "ann")
MADE = new_authority("tests")
CA = Authority.of(MADE)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    pair = CA.member(ANN)
    Credentials.of("fleet.example:8440", MADE.certificate, pair.certificate, pair.key).save(tmp_path / "ann.fleet")
    return tmp_path / "ann.fleet"


def test_a_file_says_where_and_who_and_only_its_owner_can_read_it(file: Path) -> None:
    found = read_credentials(file)
    assert (found.identity, found.address) == (ANN, "fleet.example:8440")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert found.key.decode() not in repr(found)
    access = Access(None, file)
    assert access.address == "fleet.example:8440"


@pytest.mark.parametrize("mode", [0o644, 0o604, 0o660, 0o666, 0o620])
def test_a_file_that_others_can_read_or_change_is_refused(file: Path, mode: int) -> None:
    os.chmod(file, mode)
    with pytest.raises(UsageError, match=f"mode {mode:04o}.*chmod 600"):
        read_credentials(file)
    os.chmod(file, 0o640)  # as Kubernetes mounts a secret
    read_credentials(file)


def no_json(told: dict[str, Any]) -> str:
    return json.dumps(told)[:-30]


def no_key(told: dict[str, Any]) -> str:
    del told["key"]
    return json.dumps(told)


def other_format(told: dict[str, Any]) -> str:
    return json.dumps(told | {"format": "pickle"})


def number_for_text(told: dict[str, Any]) -> str:
    return json.dumps(told | {"ca": 7})


def torn_certificate(told: dict[str, Any]) -> str:
    return json.dumps(told | {"certificate": told["certificate"][:200]})


def torn_ca(told: dict[str, Any]) -> str:
    return json.dumps(told | {"ca": told["ca"].replace("M", "N", 3)[:100]})


def others_key(told: dict[str, Any]) -> str:
    return json.dumps(told | {"key": CA.member(ANN).key.decode()})


def no_role(told: dict[str, Any]) -> str:
    pair = CA.server(["localhost"])
    return json.dumps(told | {"key": pair.key.decode(), "certificate": pair.certificate.decode()})


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (no_json, "is damaged"),
        (no_key, "is damaged"),
        (other_format, "not of format fairfleet-credentials-1"),
        (number_for_text, "is damaged"),
        (torn_certificate, "the certificate in .* is damaged"),
        (torn_ca, "the CA in .* is damaged"),
        (others_key, "its key is not that of its certificate"),
        (no_role, "neither a client nor an operator"),
    ],
)
def test_a_damaged_file_is_said_to_be_so(file: Path, damage: Callable[[dict[str, Any]], str], message: str) -> None:
    key = json.loads(file.read_text())["key"]
    file.write_text(damage(json.loads(file.read_text())))
    with pytest.raises(UsageError, match=message) as caught:
        read_credentials(file)
    assert key.splitlines()[1] not in str(caught.value)


def test_credentials_that_have_ended_are_refused_with_the_date(tmp_path: Path) -> None:
    old = Authority.of(new_authority("old", now=datetime.now(UTC) - timedelta(days=300)))
    pair = old.member(ANN, timedelta(days=90), datetime.now(UTC) - timedelta(days=100))
    Credentials.of("127.0.0.1:1", MADE.certificate, pair.certificate, pair.key).save(tmp_path / "ann.fleet")
    with pytest.raises(UsageError, match=r"client ann ended on \d{4}-\d\d-\d\d"):
        Access(None, tmp_path / "ann.fleet")


def test_a_renewed_file_is_taken_up_and_a_damaged_one_is_not(file: Path) -> None:
    access = Access(None, file)
    first = access.credentials
    assert first is not None
    assert not access.renewed
    pair = CA.member(ANN)
    second = Credentials.of(first.address, first.ca, pair.certificate, pair.key)
    second.save(file)
    assert access.renewed
    assert access.credentials == second
    file.write_text("{")
    assert not access.renewed
    assert access.credentials == second


@pytest.mark.parametrize("address", ["fleet.example:8440", "10.0.0.5:8440", "127.0.0.1.evil.example:1"])
def test_another_machine_is_not_called_in_the_clear_unless_that_is_meant(address: str) -> None:
    with pytest.raises(UsageError, match="in the clear"):
        Access(address)
    assert Access(address, insecure=True).credentials is None


# ---- certificates -----------------------------------------------------------------------------------


def test_a_certificate_never_outlives_its_ca() -> None:
    short = Authority.of(new_authority("short", timedelta(days=10)))
    assert certified(short.member(ANN).certificate).ends == short.certificate.not_valid_after_utc


def test_a_server_certificate_is_of_nobody() -> None:
    assert certified(CA.server(["localhost", "10.0.0.5"]).certificate).identity == NOBODY


def test_a_request_proves_its_key_and_says_whom_it_is_for() -> None:
    key, request = new_request(ANN)
    asked, public = read_request(request)
    assert asked == ANN
    assert certified(CA.certify(asked, public)).identity == ANN
    assert b"PRIVATE" in key


def signed(key: Any, hash: Any = None) -> bytes:
    builder = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([]))
    return builder.sign(key, hash or hashes.SHA256()).public_bytes(serialization.Encoding.DER)


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"",
        b"garbage",
        new_request(ANN)[1][:-1],
        bytes([*new_request(ANN)[1][:-1], 0]),
        b"\x30" * 9000,
        signed(rsa.generate_private_key(65537, 2048)),
        signed(ec.generate_private_key(ec.SECP384R1())),
    ],
    ids=["empty", "garbage", "torn", "forged", "huge", "rsa", "p384"],
)
def test_what_is_no_request_of_ours_is_refused(request_bytes: bytes) -> None:
    with pytest.raises(BadRequest):
        read_request(request_bytes)


def test_a_key_of_another_ca_is_noticed() -> None:
    with pytest.raises(UsageError, match="not that of its certificate"):
        Authority.of(Pair(new_authority("other").key, MADE.certificate))


# ---- tokens, durations, folders -----------------------------------------------------------------------


def test_a_token_survives_being_pasted_and_a_part_of_it_does_not() -> None:
    token = EnrolmentToken("ann", "fleet.example:8442", "fleet.example:8440", b"\x00\xff" * 16, MADE.certificate)
    text = token.text()
    assert read_token(f"  {text}\n") == token
    assert token.secret.hex() not in repr(token)
    assert text.isascii()
    for torn in ("", text[5:], text[:40], text.replace(".", "", 2), "fft1.e30.e30.e30"):
        with pytest.raises(UsageError, match="no token"):
            read_token(torn)


@pytest.mark.parametrize("text", ["", "90", "d", "-1d", "0s", "1.5h", "99999999w", "1y", "٣d"])
def test_what_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="no duration"):
        duration(text)


def test_a_ca_is_never_written_over(tmp_path: Path) -> None:
    folder = PkiFolder(tmp_path / "pki")
    times = {"ca_ttl": timedelta(days=9), "server_ttl": timedelta(days=9)}
    with pytest.raises(UsageError, match="neither a DNS name"):
        folder.create(["bücher"], "b:1", **times)
    assert not folder.path.exists()
    folder.create(["fleet.example"], "fleet.example:8440", **times)
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
    for secret in ("ca.key", "server.key"):
        assert stat.S_IMODE((folder.path / secret).stat().st_mode) == 0o600
    with pytest.raises(UsageError, match="holds a CA already"):
        folder.create(["fleet.example"], "fleet.example:8440", **times)
