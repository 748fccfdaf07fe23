"""By hand, from a CA to a client that trains: no secret is told, mistakes are said, HTTP wants its token."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.e2e.fleet import Fleet, free_port
from tests.e2e.scraping import get


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


def test_a_server_without_a_token_does_not_answer_by_a_name_that_a_stranger_could_have(fleet: Fleet) -> None:
    fleet.init()
    port = free_port()
    fleet.start_server(http__port=port, http__hosts="fleet.example,other.example")
    url = f"http://127.0.0.1:{port}"
    for path in ("/", "/metrics", "/api/state"):
        assert get(url + path, Host="rebound.example")[0] == 421
    for host in ("fleet.example", f"localhost:{port}", "server:8441"):  # the last as Prometheus in a compose file
        assert get(f"{url}/metrics", Host=host)[0] == 200
    assert get(f"{url}/readyz", Host="rebound.example")[0] == 200


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
