"""A client that cannot connect says why: which side speaks TLS, or which certificate is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from fairfleet.client.agent.connection_probe import ProbeResult, Problem, mismatch, probe
from fairfleet.common.net.server_access import ServerAccess
from fairfleet.common.pki.certificates import Authority, new_authority
from fairfleet.common.pki.credentials import Credentials
from tests.support.fleet import Fleet, free_port, until
from tests.support.secure import SecureFleet, client

TASK = ("client", "--task", "tasks:shift", "-o", "size=1000")
TLS = bytes.fromhex("160303007a0200007603")
ALERT = bytes.fromhex("1503030002022f")
CLEAR = bytes.fromhex("000018040000000000000300")


def foreign_credentials(fleet: SecureFleet, name: str) -> Path:
    """Return a file with credentials of another federation's CA."""
    authority = new_authority("another")
    pair = Authority.of(authority).member(client(name))
    file = fleet.folder / f"foreign-{name}.fleet"
    Credentials.of(fleet.address, authority.certificate, pair.certificate, pair.key).save(file)
    return file


@pytest.mark.parametrize(
    ("answer", "encrypted", "problem"),
    [
        (TLS, False, Problem.SERVER_WANTS_TLS),
        (ALERT, False, Problem.SERVER_WANTS_TLS),
        (CLEAR, True, Problem.SERVER_IN_CLEAR),
        (b"HTTP/1.1 400 Bad Request\r\n", True, Problem.SERVER_IN_CLEAR),
        (TLS, True, None),
        (CLEAR, False, None),
        (b"", True, None),
        (b"", False, None),
        (b"SSH-2.0-OpenSSH_9.6", True, None),
        (b"\x15", False, None),
    ],
)
def test_the_first_bytes_of_an_answer_show_which_side_speaks_tls(
    answer: bytes, encrypted: bool, problem: Problem | None
) -> None:
    assert mismatch(answer, encrypted) is problem


def test_the_probe_reports_nothing_if_nothing_is_wrong_or_no_server_answers(
    standing: SecureFleet, fleet: Fleet
) -> None:
    credentials = standing.credentials_file(client("ann"))
    assert probe(ServerAccess(standing.address, credentials)) is None
    assert probe(ServerAccess(f"127.0.0.1:{free_port()}", credentials)) is None
    assert probe(ServerAccess(f"127.0.0.1:{free_port()}")) is None
    assert probe(ServerAccess("unix:/nowhere")) is None
    fleet.init()
    fleet.start_server()
    assert probe(ServerAccess(fleet.address)) is None
    assert probe(ServerAccess(fleet.address, credentials)) == ProbeResult(
        Problem.SERVER_IN_CLEAR, is_lasting=True
    )


def test_the_probe_reports_what_is_wrong_with_a_certificate(
    standing: SecureFleet, own: SecureFleet
) -> None:
    assert probe(ServerAccess(standing.address)) == ProbeResult(
        Problem.SERVER_WANTS_TLS, is_lasting=True
    )
    assert probe(
        ServerAccess(standing.address, foreign_credentials(standing, "ann"))
    ) == ProbeResult(Problem.UNKNOWN_CA, is_lasting=False)
    own.init()
    own.give_server(own.authority.server(["fleet.example"]))
    own.start_server()
    credentials = own.credentials_file(client("ann"))
    assert probe(ServerAccess(own.address, credentials)) == ProbeResult(
        Problem.OTHER_HOST, is_lasting=False
    )


def test_the_probe_does_not_bypass_a_proxy(
    standing: SecureFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:1")
    monkeypatch.delenv("no_proxy", raising=False)
    assert probe(ServerAccess(standing.address)) is None
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    assert probe(ServerAccess(standing.address)) is not None


def test_a_client_without_credentials_reports_a_tls_server_and_ends(standing: SecureFleet) -> None:
    done = standing.run(*TASK, "--server", standing.address, "--name", "ann")
    assert done.returncode == 2
    assert "the server there uses TLS" in done.stderr
    assert "--credentials NAME.fleet" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_client_with_credentials_reports_an_unencrypted_server_and_ends(
    standing: SecureFleet, fleet: Fleet
) -> None:
    fleet.init()
    fleet.start_server()
    done = fleet.run(
        *TASK,
        "--server",
        fleet.address,
        "--credentials",
        str(standing.credentials_file(client("ann"))),
    )
    assert done.returncode == 6
    assert "does not use TLS: start it with --pki" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_client_reports_a_wrong_server_certificate_and_waits_for_a_right_one(
    own: SecureFleet,
) -> None:
    own.init()
    pair = own.authority.server(["127.0.0.1"])
    own.give_server(own.authority.server(["fleet.example"]))
    own.start_server(rounds=1, round__minimum_clients=1, exit_when_finished=True)
    own.start_client("ann")
    until(
        lambda: "the server's certificate is for another host name" in own.log("ann.log"),
        "the reason",
    )
    own.give_server(pair)
    assert own.wait_clients() == {"ann": 0}


def test_a_client_that_starts_before_its_server_waits_for_it(own: SecureFleet) -> None:
    own.init()
    own.start_client("ann")
    until(lambda: "trying again" in own.log("ann.log"), "the first try")
    own.start_server(rounds=1, round__minimum_clients=1, exit_when_finished=True)
    assert own.wait_clients() == {"ann": 0}


@pytest.mark.slow
def test_a_client_that_has_joined_once_does_not_end_when_the_server_changes_to_tls(
    own: SecureFleet,
) -> None:
    own.init()
    Fleet.start_server(own, rounds=1000)  # without TLS
    own.clients["ann"] = own._start(
        [
            *TASK,
            "--server",
            own.address,
            "--name",
            "ann",
            "--state-dir",
            str(own.folder / "clients"),
        ],
        "ann.log",
    )
    until(lambda: "joined" in own.log("ann.log"), "the client")
    own.kill_server()
    own.start_server(rounds=1000)
    until(lambda: "the server there uses TLS" in own.log("ann.log"), "the reason")
    assert own.clients["ann"].poll() is None


def test_an_operator_command_reports_connection_problems_too(standing: SecureFleet) -> None:
    done = standing.run(
        "status",
        "--server",
        standing.address,
        "--credentials",
        str(foreign_credentials(standing, "eve")),
    )
    assert done.returncode == 6
    assert "not of the CA in --credentials" in done.stderr
    done = standing.run("status", "--server", f"127.0.0.1:{free_port()}")
    assert done.returncode == 6
    assert "no FairFleet server answers" in done.stderr
