"""A client renews its certificate in time, and keeps it if the answer cannot be used."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from fairfleet.client.device import enrolment
from fairfleet.client.device.certificate_renewal import Renewal
from fairfleet.common.net.server_access import ServerAccess
from fairfleet.common.pki.certificates import Authority, certified, new_authority, read_request
from fairfleet.common.pki.credentials import Credentials, read_credentials
from fairfleet.common.pki.identity import Identity, Role

ANN, HOUR = Identity(Role.CLIENT, "ann"), timedelta(hours=1)
CA = new_authority("CA", now=datetime.now(UTC) - 400 * HOUR)
AUTHORITY = Authority.of(CA)
Sign = Callable[[Identity, Any], bytes]


def correct(who: Identity, key: Any) -> bytes:
    return AUTHORITY.certify(who, key, 90 * HOUR)


def of_another(who: Identity, key: Any) -> bytes:
    return AUTHORITY.certify(Identity(Role.CLIENT, "bob"), key, 90 * HOUR)


def of_an_operator(who: Identity, key: Any) -> bytes:
    return AUTHORITY.certify(Identity(Role.OPERATOR, "ann"), key, 90 * HOUR)


def of_another_key(who: Identity, key: Any) -> bytes:
    return AUTHORITY.member(who).certificate


def expired(who: Identity, key: Any) -> bytes:
    return AUTHORITY.certify(who, key, HOUR, datetime.now(UTC) - 9 * HOUR)


def nothing(who: Identity, key: Any) -> bytes:
    return b""


def garbage(who: Identity, key: Any) -> bytes:
    return b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"


def renew_three_times(
    folder: Path, monkeypatch: pytest.MonkeyPatch, sign: Sign, remaining: timedelta
) -> tuple[Path, bytes, int]:
    """Check a certificate of 90 hours three times, when so much of its lifetime remains.

    Return the file, its earlier contents, and the number of requests to the server.
    """
    file, requests = folder / "ann.fleet", list[bytes]()
    pair = AUTHORITY.member(ANN, 90 * HOUR, datetime.now(UTC) - 90 * HOUR + remaining)
    Credentials.of("127.0.0.1:1", CA.certificate, pair.certificate, pair.key).save(file)

    class Stub:
        def __init__(self, channel: object) -> None: ...

        def Renew(self, request: Any, timeout: float) -> Any:  # noqa: N802
            requests.append(request.request)
            return enrolment.pb.RenewResponse(certificate=sign(*read_request(request.request)))

    monkeypatch.setattr(enrolment, "EnrolmentStub", Stub)
    renewal, before = Renewal(ServerAccess(None, file)), file.read_bytes()
    for _ in range(3):
        renewal.renew_if_due()
    return file, before, len(requests)


def test_a_certificate_is_renewed_in_the_last_third_of_its_lifetime(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, before, requests = renew_three_times(tmp_path, monkeypatch, correct, 29 * HOUR)
    assert requests == 1
    assert file.read_bytes() != before
    renewed = read_credentials(file)
    assert renewed.identity == ANN
    assert renewed.ends > datetime.now(UTC) + 89 * HOUR
    assert certified(renewed.certificate).identity == ANN


def test_a_certificate_is_not_renewed_before_the_last_third(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, before, requests = renew_three_times(tmp_path, monkeypatch, correct, 35 * HOUR)
    assert (requests, file.read_bytes()) == (0, before)


@pytest.mark.parametrize(
    "sign", [of_another, of_an_operator, of_another_key, expired, nothing, garbage]
)
def test_an_answer_that_cannot_be_used_does_not_replace_a_working_certificate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sign: Sign, caplog: pytest.LogCaptureFixture
) -> None:
    file, before, requests = renew_three_times(tmp_path, monkeypatch, sign, 10 * HOUR)
    assert (requests, file.read_bytes()) == (1, before)  # it is not requested again at once
    assert "is not renewed: the server answered with" in caplog.text


def test_a_mounted_folder_is_not_renewed_by_the_client(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = AUTHORITY.member(ANN, 90 * HOUR, datetime.now(UTC) - 80 * HOUR)
    for name, content in {
        "ca.crt": CA.certificate,
        "tls.crt": pair.certificate,
        "tls.key": pair.key,
    }.items():
        (tmp_path / name).touch(mode=0o600)
        (tmp_path / name).write_bytes(content)

    def refused(channel: object) -> None:
        raise AssertionError("a request was sent")

    monkeypatch.setattr(enrolment, "EnrolmentStub", refused)
    Renewal(ServerAccess("127.0.0.1:1", tmp_path)).renew_if_due()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ca.crt", "tls.crt", "tls.key"]
