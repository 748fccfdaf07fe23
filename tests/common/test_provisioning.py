"""`fairfleet pki provision`: everything that is needed is there afterwards, and what was good stays as it was."""

from __future__ import annotations

import shutil
import stat
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fairfleet.common import private_files
from fairfleet.common.certificates import Authority, Pair, belong_together, new_authority
from fairfleet.common.credentials import Credentials, read_credentials
from fairfleet.common.errors import UsageError
from fairfleet.common.identity import Identity, Role
from fairfleet.common.pki_folder import PkiFolder
from fairfleet.common.program import program
from fairfleet.common.provisioning import Fleet

CLIENTS = ("client-0", "client-1", "client-2")


def fleet(folder: Path, **other: object) -> Fleet:
    told: dict[str, object] = {"names": ["server"], "address": "server:8440", "operator_address": "127.0.0.1:8440"}
    return Fleet(folder, **{**told, "clients": CLIENTS, **other})  # type: ignore[arg-type]


def files(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.glob("*/*")}


def is_whole(folder: Path) -> bool:
    """Everybody's credentials are of the CA, and the server's files belong together."""
    server, ca = folder / "server", (folder / "ca" / "ca.crt").read_bytes()
    members = [read_credentials(file) for file in folder.glob("*/*.fleet")]
    return (
        (server / "ca.crt").read_bytes() == ca
        and belong_together(Pair((server / "server.key").read_bytes(), (server / "server.crt").read_bytes()))
        and {str(member.identity) for member in members} == {"operator operator", *(f"client {n}" for n in CLIENTS)}
        and all(member.ca == ca for member in members)
    )


def test_everybody_gets_what_is_theirs_and_the_cas_key_stays_alone(tmp_path: Path) -> None:
    made = fleet(tmp_path).provision()
    assert made[0] == "CA"
    assert is_whole(tmp_path)
    assert sorted(path.name for path in (tmp_path / "server").iterdir()) == ["ca.crt", "server.crt", "server.key"]
    assert [str(file.relative_to(tmp_path)) for file in tmp_path.glob("**/ca.key")] == ["ca/ca.key"]
    assert PkiFolder(tmp_path / "ca").server_names() == ["server", "localhost", "127.0.0.1", "::1"]
    assert read_credentials(tmp_path / "operator" / "operator.fleet").address == "127.0.0.1:8440"
    assert read_credentials(tmp_path / "clients" / "client-2.fleet").address == "server:8440"
    for file in (*tmp_path.glob("**/*.key"), *tmp_path.glob("**/*.fleet")):
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
    for folder in tmp_path.iterdir():
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_what_is_there_and_good_is_left_alone_to_the_byte(tmp_path: Path) -> None:
    fleet(tmp_path).provision()
    before = files(tmp_path)
    assert fleet(tmp_path).provision() == []
    assert files(tmp_path) == before


def test_a_larger_fleet_keeps_the_smaller_ones_credentials(tmp_path: Path) -> None:
    fleet(tmp_path).provision()
    before = files(tmp_path)
    assert fleet(tmp_path, clients=(*CLIENTS, "client-3")).provision() == ["clients/client-3.fleet"]
    assert before.items() <= files(tmp_path).items()


def test_what_ends_soon_is_renewed_and_nothing_else(tmp_path: Path) -> None:
    fleet(tmp_path).provision()
    pki = PkiFolder(tmp_path / "ca")
    old = pki.enroll(Identity(Role.CLIENT, "client-1"), timedelta(days=29), "server:8440")
    old.save(tmp_path / "clients" / "client-1.fleet")
    assert fleet(tmp_path).provision() == ["clients/client-1.fleet"]
    pki.renew_server([], timedelta(days=100))
    assert fleet(tmp_path).provision() == ["server/server.key", "server/server.crt"]
    assert is_whole(tmp_path)


def test_another_name_of_the_server_gives_it_another_certificate_of_the_same_ca(tmp_path: Path) -> None:
    fleet(tmp_path).provision()
    clients = files(tmp_path / "clients")
    assert fleet(tmp_path, names=["server", "fleet.example"]).provision() == ["server/server.key", "server/server.crt"]
    assert "fleet.example" in PkiFolder(tmp_path / "ca").server_names()
    assert files(tmp_path / "clients") == clients
    assert fleet(tmp_path, names=["server"]).provision() == ["server/server.key", "server/server.crt"]


def test_another_address_or_ca_or_a_damaged_file_gives_new_credentials(tmp_path: Path) -> None:
    fleet(tmp_path).provision()
    assert fleet(tmp_path, operator_address="127.0.0.1:9000").provision() == ["operator/operator.fleet"]
    fleet(tmp_path).provision()
    (tmp_path / "clients" / "client-0.fleet").write_text("{")
    another = new_authority("another")
    other = Authority.of(another).member(Identity(Role.CLIENT, "client-2"))
    stranger = Credentials.of("server:8440", another.certificate, other.certificate, other.key)
    stranger.save(tmp_path / "clients" / "client-2.fleet")
    assert fleet(tmp_path).provision() == ["clients/client-0.fleet", "clients/client-2.fleet"]
    assert is_whole(tmp_path)


class Died(Exception):
    pass


@pytest.fixture
def deaths(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many more files are written before the process dies."""
    left = [1 << 30]
    write = private_files.write_private

    def written(path: Path, content: bytes, mode: int = 0o600) -> None:
        if not left[0]:
            raise Died
        left[0] -= 1
        write(path, content, mode)

    for module in ("pki_folder", "credentials", "provisioning"):
        monkeypatch.setattr(f"fairfleet.common.{module}.write_private", written)
    return left


def test_whenever_it_dies_the_next_run_makes_it_whole(tmp_path: Path, deaths: list[int]) -> None:
    for written in range(12):
        folder = tmp_path / str(written)
        deaths[0] = written
        with pytest.raises(Died):
            fleet(folder).provision()
        deaths[0] = 1 << 30
        fleet(folder).provision()
        assert is_whole(folder), f"after {written} files"
    deaths[0] = 12
    fleet(tmp_path / "all").provision()  # five of the CA, three of the server, an operator and three clients


def test_a_renewal_that_died_between_key_and_certificate_is_done_again(tmp_path: Path, deaths: list[int]) -> None:
    fleet(tmp_path).provision()
    deaths[0] = 1
    with pytest.raises(Died):
        fleet(tmp_path, names=["other"]).provision()
    deaths[0] = 1 << 30
    fleet(tmp_path).provision()
    assert is_whole(tmp_path)


def test_a_ca_with_members_is_never_replaced(tmp_path: Path) -> None:
    fleet(tmp_path).provision()
    shutil.move(tmp_path / "ca" / "ca.crt", tmp_path / "lost")
    with pytest.raises(UsageError, match=r"put a copy of the ca.crt there back"):
        fleet(tmp_path).provision()
    assert (tmp_path / "ca" / "ca.key").exists()


def test_the_command_says_what_it_made(tmp_path: Path) -> None:
    words = ["pki", "provision", str(tmp_path), "server", "--address", "server:8440", "--clients", "3"]
    first, second = (CliRunner().invoke(program("pki"), words).output for _ in range(2))
    assert "made CA, server/server.key" in first
    assert "and 2 more; 3 clients at server:8440" in first
    assert "everything was there" in second


def test_clients_that_would_share_a_name_are_refused(tmp_path: Path) -> None:
    words = ["pki", "provision", str(tmp_path), "server", "--address", "server:8440", "--client-name", "client"]
    failed = CliRunner().invoke(program("pki"), words)
    assert isinstance(failed.exception, UsageError)
    assert "{replica}" in str(failed.exception)
    assert not list(tmp_path.iterdir())


def test_a_file_can_be_written_to_standard_output(tmp_path: Path) -> None:
    fleet(tmp_path).provision()
    words = ["enroll", "kitchen", "--pki", str(tmp_path / "ca"), "--address", "fleet.example:1", "--output", "-"]
    told = CliRunner().invoke(program("enroll"), words).output
    file = tmp_path / "kitchen.fleet"
    file.touch(0o600)
    file.write_text(told)
    found = read_credentials(file)
    assert (str(found.identity), found.address) == ("client kitchen", "fleet.example:1")


def test_two_at_once_make_one_authority(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "fairfleet.common.cli", "pki", "provision", str(tmp_path), "server"]
    command += ["--address", "server:8440", "--operator-address", "127.0.0.1:8440", "--clients", "3"]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(3)]
    ends = [process.communicate(timeout=60) for process in both]
    assert [process.returncode for process in both] == [0, 0, 0], ends
    assert is_whole(tmp_path)


@pytest.mark.parametrize("wrong", ["a.example,b.example", "bad name!", "", "-x", "a..b", "x" * 64])
def test_a_name_that_is_none_is_refused_and_nothing_is_made(tmp_path: Path, wrong: str) -> None:
    with pytest.raises(UsageError, match="neither a DNS name nor an IP address"):
        fleet(tmp_path, names=["server", wrong]).provision()
    assert not list(tmp_path.iterdir())


def test_an_address_may_be_written_in_several_ways(tmp_path: Path) -> None:
    names = ["server", "*.fleet.example", "2001:DB8:0::1"]
    assert fleet(tmp_path, names=names).provision()
    assert fleet(tmp_path, names=names).provision() == []
