"""Credentials: the content of certificates, and the refusal of damaged files."""

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

from fairfleet.common.cli.durations import parse_duration
from fairfleet.common.errors import BadRequest, UsageError
from fairfleet.common.net.server_access import ServerAccess
from fairfleet.common.pki.certificates import (
    Authority,
    KeyPair,
    certified,
    new_authority,
    new_request,
    read_request,
)
from fairfleet.common.pki.credentials import Credentials, read_credentials
from fairfleet.common.pki.enrolment_token import EnrolmentToken, read_token
from fairfleet.common.pki.identity import NOBODY, Identity, Role
from fairfleet.common.pki.pki_folder import PkiFolder

ANN = Identity(Role.CLIENT, "ann")
MADE = new_authority("tests")
CA = Authority.of(MADE)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    pair = CA.member(ANN)
    Credentials.of("fleet.example:8440", MADE.certificate, pair.certificate, pair.key).save(
        tmp_path / "ann.fleet"
    )
    return tmp_path / "ann.fleet"


def test_a_file_has_identity_and_address_and_only_its_owner_can_read_it(file: Path) -> None:
    credentials = read_credentials(file)
    assert (credentials.identity, credentials.address) == (ANN, "fleet.example:8440")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert credentials.key.decode() not in repr(credentials)
    access = ServerAccess(None, file)
    assert access.address == "fleet.example:8440"


@pytest.mark.parametrize("mode", [0o644, 0o604, 0o660, 0o666, 0o620])
def test_a_file_that_others_can_read_or_change_is_refused(file: Path, mode: int) -> None:
    os.chmod(file, mode)
    with pytest.raises(UsageError, match=f"mode {mode:04o}.*chmod 600"):
        read_credentials(file)
    os.chmod(file, 0o640)  # as Kubernetes mounts a secret
    read_credentials(file)


def no_json(content: dict[str, Any]) -> str:
    return json.dumps(content)[:-30]


def no_key(content: dict[str, Any]) -> str:
    del content["key"]
    return json.dumps(content)


def other_format(content: dict[str, Any]) -> str:
    return json.dumps(content | {"format": "pickle"})


def number_for_text(content: dict[str, Any]) -> str:
    return json.dumps(content | {"ca": 7})


def torn_certificate(content: dict[str, Any]) -> str:
    return json.dumps(content | {"certificate": content["certificate"][:200]})


def torn_ca(content: dict[str, Any]) -> str:
    return json.dumps(content | {"ca": content["ca"].replace("M", "N", 3)[:100]})


def others_key(content: dict[str, Any]) -> str:
    return json.dumps(content | {"key": CA.member(ANN).key.decode()})


def no_role(content: dict[str, Any]) -> str:
    pair = CA.server(["localhost"])
    return json.dumps(
        content | {"key": pair.key.decode(), "certificate": pair.certificate.decode()}
    )


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
def test_a_damaged_file_is_refused_with_the_reason(
    file: Path, damage: Callable[[dict[str, Any]], str], message: str
) -> None:
    key = json.loads(file.read_text())["key"]
    file.write_text(damage(json.loads(file.read_text())))
    with pytest.raises(UsageError, match=message) as caught:
        read_credentials(file)
    assert key.splitlines()[1] not in str(caught.value)


def test_expired_credentials_are_refused_with_the_date(tmp_path: Path) -> None:
    old = Authority.of(new_authority("old", now=datetime.now(UTC) - timedelta(days=300)))
    pair = old.member(ANN, timedelta(days=90), datetime.now(UTC) - timedelta(days=100))
    Credentials.of("127.0.0.1:1", MADE.certificate, pair.certificate, pair.key).save(
        tmp_path / "ann.fleet"
    )
    with pytest.raises(UsageError, match=r"client ann expired on \d{4}-\d\d-\d\d"):
        ServerAccess(None, tmp_path / "ann.fleet")


def test_a_renewed_file_is_loaded_and_a_damaged_one_is_not(file: Path) -> None:
    access = ServerAccess(None, file)
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


@pytest.mark.parametrize(
    "address", ["fleet.example:8440", "10.0.0.5:8440", "127.0.0.1.evil.example:1"]
)
def test_unencrypted_access_to_another_machine_needs_insecure(address: str) -> None:
    with pytest.raises(UsageError, match="sent unencrypted"):
        ServerAccess(address)
    assert ServerAccess(address, insecure=True).credentials is None


# ---- certificates ------------------------------------------------------------------------


def test_a_certificate_never_outlives_its_ca() -> None:
    short = Authority.of(new_authority("short", timedelta(days=10)))
    assert certified(short.member(ANN).certificate).ends == short.certificate.not_valid_after_utc


def test_a_server_certificate_has_no_identity() -> None:
    assert certified(CA.server(["localhost", "10.0.0.5"]).certificate).identity == NOBODY


def test_a_request_proves_its_key_and_contains_its_identity() -> None:
    key, request = new_request(ANN)
    identity, public = read_request(request)
    assert identity == ANN
    assert certified(CA.certify(identity, public)).identity == ANN
    assert b"PRIVATE" in key


def signed(key: Any, digest: Any = None) -> bytes:
    builder = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([]))
    return builder.sign(key, digest or hashes.SHA256()).public_bytes(serialization.Encoding.DER)


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
def test_a_malformed_request_is_refused(request_bytes: bytes) -> None:
    with pytest.raises(BadRequest):
        read_request(request_bytes)


def test_a_key_of_another_ca_is_refused() -> None:
    with pytest.raises(UsageError, match="not that of its certificate"):
        Authority.of(KeyPair(new_authority("other").key, MADE.certificate))


# ---- tokens, durations, folders ----------------------------------------------------------


def test_a_pasted_token_is_read_and_an_incomplete_one_is_refused() -> None:
    token = EnrolmentToken(
        "ann", "fleet.example:8442", "fleet.example:8440", b"\x00\xff" * 16, MADE.certificate
    )
    text = token.text()
    assert read_token(f"  {text}\n") == token
    assert token.secret.hex() not in repr(token)
    assert text.isascii()
    for torn in ("", text[5:], text[:40], text.replace(".", "", 2), "fft1.e30.e30.e30"):
        with pytest.raises(UsageError, match="no token"):
            read_token(torn)


@pytest.mark.parametrize("text", ["", "90", "d", "-1d", "0s", "1.5h", "99999999w", "1y", "٣d"])
def test_an_invalid_duration_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="not a duration"):
        parse_duration(text)


def test_a_ca_is_never_overwritten(tmp_path: Path) -> None:
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
