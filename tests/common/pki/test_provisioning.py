"""`fairfleet pki provision` creates everything needed, and keeps valid files unchanged."""

from __future__ import annotations

import shutil
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fairfleet.common.cli.program import program
from fairfleet.common.errors import UsageError
from fairfleet.common.pki import private_files
from fairfleet.common.pki.certificates import Authority, KeyPair, belong_together, new_authority
from fairfleet.common.pki.credentials import Credentials, read_credentials
from fairfleet.common.pki.identity import Identity, Role
from fairfleet.common.pki.pki_folder import PkiFolder
from fairfleet.common.pki.provisioning import ProvisionedFleet
from tests.support.flock_holder import flock_held

CLIENTS = ("client-0", "client-1", "client-2")


def fleet(folder: Path, **changes: object) -> ProvisionedFleet:
    fields: dict[str, object] = {
        "names": ["server"],
        "address": "server:8440",
        "operator_address": "127.0.0.1:8440",
    }
    return ProvisionedFleet(folder, **{**fields, "clients": CLIENTS, **changes})  # type: ignore[arg-type]


def files(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.glob("*/*")}


def is_complete(folder: Path) -> bool:
    """Check that the CA signed all credentials, and that the server's files belong together."""
    server, ca = folder / "server", (folder / "ca" / "ca.crt").read_bytes()
    members = [read_credentials(file) for file in folder.glob("*/*.fleet")]
    return (
        (server / "ca.crt").read_bytes() == ca
        and belong_together(
            KeyPair((server / "server.key").read_bytes(), (server / "server.crt").read_bytes())
        )
        and {str(member.identity) for member in members}
        == {"operator operator", *(f"client {n}" for n in CLIENTS)}
        and all(member.ca == ca for member in members)
    )


def test_each_folder_has_its_files_and_only_ca_has_the_ca_key(tmp_path: Path) -> None:
    written = fleet(tmp_path).provision()
    assert written[0] == "CA"
    assert is_complete(tmp_path)
    assert sorted(path.name for path in (tmp_path / "server").iterdir()) == [
        "ca.crt",
        "server.crt",
        "server.key",
    ]
    assert [str(file.relative_to(tmp_path)) for file in tmp_path.glob("**/ca.key")] == ["ca/ca.key"]
    assert PkiFolder(tmp_path / "ca").server_names() == ["server", "localhost", "127.0.0.1", "::1"]
    assert read_credentials(tmp_path / "operator" / "operator.fleet").address == "127.0.0.1:8440"
    assert read_credentials(tmp_path / "clients" / "client-2.fleet").address == "server:8440"
    for file in (*tmp_path.glob("**/*.key"), *tmp_path.glob("**/*.fleet")):
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
    for folder in tmp_path.iterdir():
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_valid_files_stay_unchanged(tmp_path: Path) -> None:
    fleet(tmp_path).provision()
    before = files(tmp_path)
    assert fleet(tmp_path).provision() == []
    assert files(tmp_path) == before


def test_adding_a_client_keeps_the_existing_credentials(tmp_path: Path) -> None:
    fleet(tmp_path).provision()
    before = files(tmp_path)
    assert fleet(tmp_path, clients=(*CLIENTS, "client-3")).provision() == ["clients/client-3.fleet"]
    assert before.items() <= files(tmp_path).items()


def test_only_certificates_that_expire_soon_are_renewed(tmp_path: Path) -> None:
    fleet(tmp_path).provision()
    pki = PkiFolder(tmp_path / "ca")
    old = pki.enroll(Identity(Role.CLIENT, "client-1"), timedelta(days=29), "server:8440")
    old.save(tmp_path / "clients" / "client-1.fleet")
    assert fleet(tmp_path).provision() == ["clients/client-1.fleet"]
    pki.renew_server([], timedelta(days=100))
    assert fleet(tmp_path).provision() == ["server/server.key", "server/server.crt"]
    assert is_complete(tmp_path)


def test_a_new_server_name_gives_a_new_certificate_of_the_same_ca(
    tmp_path: Path,
) -> None:
    fleet(tmp_path).provision()
    clients = files(tmp_path / "clients")
    assert fleet(tmp_path, names=["server", "fleet.example"]).provision() == [
        "server/server.key",
        "server/server.crt",
    ]
    assert "fleet.example" in PkiFolder(tmp_path / "ca").server_names()
    assert files(tmp_path / "clients") == clients
    assert fleet(tmp_path, names=["server"]).provision() == [
        "server/server.key",
        "server/server.crt",
    ]


def test_another_address_or_ca_or_a_damaged_file_gives_new_credentials(tmp_path: Path) -> None:
    fleet(tmp_path).provision()
    assert fleet(tmp_path, operator_address="127.0.0.1:9000").provision() == [
        "operator/operator.fleet"
    ]
    fleet(tmp_path).provision()
    (tmp_path / "clients" / "client-0.fleet").write_text("{")
    another = new_authority("another")
    pair = Authority.of(another).member(Identity(Role.CLIENT, "client-2"))
    stranger = Credentials.of("server:8440", another.certificate, pair.certificate, pair.key)
    stranger.save(tmp_path / "clients" / "client-2.fleet")
    assert fleet(tmp_path).provision() == ["clients/client-0.fleet", "clients/client-2.fleet"]
    assert is_complete(tmp_path)


class Died(Exception):
    pass


@pytest.fixture
def deaths(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of files that are written before the process dies."""
    remaining = [1 << 30]
    write = private_files.write_private

    def written(path: Path, content: bytes, mode: int = 0o600) -> None:
        if not remaining[0]:
            raise Died
        remaining[0] -= 1
        write(path, content, mode)

    for module in ("pki_folder", "credentials", "provisioning"):
        monkeypatch.setattr(f"fairfleet.common.pki.{module}.write_private", written)
    return remaining


def test_a_run_after_a_crash_at_any_file_completes_the_fleet(
    tmp_path: Path, deaths: list[int]
) -> None:
    for written in range(12):
        folder = tmp_path / str(written)
        deaths[0] = written
        with pytest.raises(Died):
            fleet(folder).provision()
        deaths[0] = 1 << 30
        fleet(folder).provision()
        assert is_complete(folder), f"after {written} files"
    deaths[0] = 12
    fleet(
        tmp_path / "all"
    ).provision()  # five of the CA, three of the server, an operator and three clients


def test_a_renewal_killed_between_key_and_certificate_is_repeated(
    tmp_path: Path, deaths: list[int]
) -> None:
    fleet(tmp_path).provision()
    deaths[0] = 1
    with pytest.raises(Died):
        fleet(tmp_path, names=["other"]).provision()
    deaths[0] = 1 << 30
    fleet(tmp_path).provision()
    assert is_complete(tmp_path)


def test_a_ca_with_members_is_never_replaced(tmp_path: Path) -> None:
    fleet(tmp_path).provision()
    shutil.move(tmp_path / "ca" / "ca.crt", tmp_path / "lost")
    with pytest.raises(UsageError, match=r"put a copy of the ca.crt there back"):
        fleet(tmp_path).provision()
    assert (tmp_path / "ca" / "ca.key").exists()


def test_the_command_lists_what_it_wrote(tmp_path: Path) -> None:
    words = [
        "pki",
        "provision",
        str(tmp_path),
        "server",
        "--address",
        "server:8440",
        "--clients",
        "3",
    ]
    first, second = (CliRunner().invoke(program("pki"), words).output for _ in range(2))
    assert "made CA, server/server.key" in first
    assert "and 2 more; 3 clients at server:8440" in first
    assert "everything was there" in second


def test_clients_that_would_share_a_name_are_refused(tmp_path: Path) -> None:
    words = [
        "pki",
        "provision",
        str(tmp_path),
        "server",
        "--address",
        "server:8440",
        "--client-name",
        "client",
    ]
    failed = CliRunner().invoke(program("pki"), words)
    assert isinstance(failed.exception, UsageError)
    assert "{replica}" in str(failed.exception)
    assert not list(tmp_path.iterdir())


def test_a_file_can_be_written_to_standard_output(tmp_path: Path) -> None:
    fleet(tmp_path).provision()
    words = [
        "enroll",
        "kitchen",
        "--pki",
        str(tmp_path / "ca"),
        "--address",
        "fleet.example:1",
        "--output",
        "-",
    ]
    output = CliRunner().invoke(program("enroll"), words).output
    file = tmp_path / "kitchen.fleet"
    file.touch(0o600)
    file.write_text(output)
    credentials = read_credentials(file)
    assert (str(credentials.identity), credentials.address) == ("client kitchen", "fleet.example:1")


def test_a_run_waits_for_one_of_an_older_version(tmp_path: Path) -> None:
    (tmp_path / "ca").mkdir()
    with ThreadPoolExecutor(1) as pool:
        with flock_held(tmp_path / "ca"):
            written = pool.submit(fleet(tmp_path).provision)
            with pytest.raises(TimeoutError):
                written.result(0.5)
            assert list((tmp_path / "ca").iterdir()) == []
        assert "CA" in written.result(30)


@pytest.mark.slow
def test_concurrent_runs_make_one_authority(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "fairfleet.common.cli",
        "pki",
        "provision",
        str(tmp_path),
        "server",
    ]
    command += [
        "--address",
        "server:8440",
        "--operator-address",
        "127.0.0.1:8440",
        "--clients",
        "3",
    ]
    both = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    ends = [process.communicate(timeout=60) for process in both]
    assert [process.returncode for process in both] == [0, 0, 0], ends
    assert is_complete(tmp_path)


@pytest.mark.parametrize("wrong", ["a.example,b.example", "bad name!", "", "-x", "a..b", "x" * 64])
def test_an_invalid_name_is_refused_before_anything_is_written(tmp_path: Path, wrong: str) -> None:
    with pytest.raises(UsageError, match="neither a DNS name nor an IP address"):
        fleet(tmp_path, names=["server", wrong]).provision()
    assert not list(tmp_path.iterdir())


def test_an_address_may_be_written_in_several_ways(tmp_path: Path) -> None:
    names = ["server", "*.fleet.example", "2001:DB8:0::1"]
    assert fleet(tmp_path, names=names).provision()
    assert fleet(tmp_path, names=names).provision() == []
