"""A client renews its certificate in time, and keeps the one it has if what comes is no better."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from fairfleet.client import enrolling
from fairfleet.client.renewing import Renewal
from fairfleet.common.access import Access
from fairfleet.common.certificates import Authority, certified, new_authority, read_request
from fairfleet.common.credentials import Credentials, read_credentials
from fairfleet.common.identity import Identity, Role

ANN, HOUR = Identity(Role.CLIENT, "ann"), timedelta(hours=1)
CA = new_authority("CA", now=datetime.now(UTC) - 400 * HOUR)
AUTHORITY = Authority.of(CA)
Sign = Callable[[Identity, Any], bytes]


def right(who: Identity, key: Any) -> bytes:
    return AUTHORITY.certify(who, key, 90 * HOUR)


def of_another(who: Identity, key: Any) -> bytes:
    return AUTHORITY.certify(Identity(Role.CLIENT, "bob"), key, 90 * HOUR)


def of_an_operator(who: Identity, key: Any) -> bytes:
    return AUTHORITY.certify(Identity(Role.OPERATOR, "ann"), key, 90 * HOUR)


def of_another_key(who: Identity, key: Any) -> bytes:
    return AUTHORITY.member(who).certificate


def ended(who: Identity, key: Any) -> bytes:
    return AUTHORITY.certify(who, key, HOUR, datetime.now(UTC) - 9 * HOUR)


def nothing(who: Identity, key: Any) -> bytes:
    return b""


def garbage(who: Identity, key: Any) -> bytes:
    return b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"


def attended(folder: Path, monkeypatch: pytest.MonkeyPatch, sign: Sign, left: timedelta) -> tuple[Path, bytes, int]:
    """The file, what it was, and how often the server was asked; of a certificate for 90 hours with so much left."""
    file, asked = folder / "ann.fleet", list[bytes]()
    pair = AUTHORITY.member(ANN, 90 * HOUR, datetime.now(UTC) - 90 * HOUR + left)
    Credentials.of("127.0.0.1:1", CA.certificate, pair.certificate, pair.key).save(file)

    class Stub:
        def __init__(self, channel: object) -> None: ...

        def Renew(self, request: Any, timeout: float) -> Any:  # noqa: N802
            asked.append(request.request)
            return enrolling.pb.RenewResponse(certificate=sign(*read_request(request.request)))

    monkeypatch.setattr(enrolling, "EnrolmentStub", Stub)
    renewal, before = Renewal(Access(None, file)), file.read_bytes()
    for _ in range(3):
        renewal.attend()
    return file, before, len(asked)


def test_it_is_renewed_in_the_last_third_of_its_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, before, asked = attended(tmp_path, monkeypatch, right, 29 * HOUR)
    assert asked == 1
    assert file.read_bytes() != before
    renewed = read_credentials(file)
    assert renewed.identity == ANN
    assert renewed.ends > datetime.now(UTC) + 89 * HOUR
    assert certified(renewed.certificate).identity == ANN


def test_it_is_left_alone_before_that(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, before, asked = attended(tmp_path, monkeypatch, right, 35 * HOUR)
    assert (asked, file.read_bytes()) == (0, before)


@pytest.mark.parametrize("sign", [of_another, of_an_operator, of_another_key, ended, nothing, garbage])
def test_an_answer_that_is_no_good_does_not_take_the_place_of_what_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sign: Sign, caplog: pytest.LogCaptureFixture
) -> None:
    file, before, asked = attended(tmp_path, monkeypatch, sign, 10 * HOUR)
    assert (asked, file.read_bytes()) == (1, before)  # and is not asked for again at once
    assert "is not renewed: the server answered with" in caplog.text


def test_a_folder_is_renewed_by_whoever_mounted_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = AUTHORITY.member(ANN, 90 * HOUR, datetime.now(UTC) - 80 * HOUR)
    for name, content in {"ca.crt": CA.certificate, "tls.crt": pair.certificate, "tls.key": pair.key}.items():
        (tmp_path / name).touch(mode=0o600)
        (tmp_path / name).write_bytes(content)

    def refused(channel: object) -> None:
        raise AssertionError("the server was asked")

    monkeypatch.setattr(enrolling, "EnrolmentStub", refused)
    Renewal(Access("127.0.0.1:1", tmp_path)).attend()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ca.crt", "tls.crt", "tls.key"]
