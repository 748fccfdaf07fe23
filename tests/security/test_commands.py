"""The commands from a CA to a training client: no secret leaks, and mistakes are reported."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.support.fleet import Fleet, free_port
from tests.support.scraping import get


def test_an_http_endpoint_with_a_token_shows_only_its_health_without_it(fleet: Fleet) -> None:
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


def test_an_http_endpoint_without_a_token_refuses_unknown_host_names(
    fleet: Fleet,
) -> None:
    fleet.init()
    port = free_port()
    fleet.start_server(http__port=port, http__hosts="fleet.example,other.example")
    url = f"http://127.0.0.1:{port}"
    for path in ("/", "/metrics", "/api/state"):
        assert get(url + path, Host="rebound.example")[0] == 421
    # Prometheus in a compose file uses the last of these names.
    for host in ("fleet.example", f"localhost:{port}", "server:8441"):
        assert get(f"{url}/metrics", Host=host)[0] == 200
    assert get(f"{url}/readyz", Host="rebound.example")[0] == 200


@pytest.mark.slow
def test_the_commands_from_a_ca_to_a_training_client_leak_no_secret(fleet: Fleet) -> None:
    """No private key or token appears in a log or on a screen where it does not belong."""
    folder, http = fleet.folder, "http-token-0123456789"
    pki, bundle = str(folder / "pki"), str(folder / "ann.fleet")

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        completed = fleet.run(*words)
        assert completed.returncode == 0, completed.stderr
        return completed

    outputs = [run("pki", "init", "localhost", "--pki", pki, "--address", fleet.address)]
    outputs.append(run("enroll", "ann", "--pki", pki, "--output", bundle, "--ttl", "2d"))
    fleet.init()
    fleet.start_server(rounds=2, pki=pki, enrolment="127.0.0.1:0", http__token=http)
    olga = f"{pki}/operator.fleet"
    token = run("token", "bob", "--credentials", olga, "--certificate-ttl", "12h")
    own = str(folder / "bob.fleet")
    outputs.append(run("enroll", "--token", token.stdout.strip(), "--output", own))
    outputs.append(run("renew", own.removesuffix(".fleet")))
    outputs.append(run("status", "--credentials", olga))
    outputs.append(run("health", "--server", fleet.address, "--credentials", olga))
    for name, file in (("ann", bundle), ("bob", own)):
        words = [
            "client",
            "--verbose",
            "--task",
            "tasks:shift",
            "-o",
            "size=1000",
            "-o",
            "shift=1",
            "-o",
            "samples=10",
        ]
        words += ["--credentials", file, "--state-dir", str(folder / "clients")]
        fleet.clients[name] = fleet._start(words, f"{name}.log")
    assert fleet.wait_clients() == {"ann": 0, "bob": 0}, fleet.log("ann.log")
    assert {client for (client,) in fleet.query("select distinct client from updates")} == {
        "ann",
        "bob",
    }
    wrong = fleet.run("client", "--task", "tasks:shift", "--credentials", bundle, "--name", "bob")
    assert (
        wrong.returncode,
        "these credentials are of client ann, not of --name bob" in wrong.stderr,
    ) == (2, True)
    wrong = fleet.run("client", "--task", "tasks:shift", "--credentials", olga)
    assert (wrong.returncode, "is the credential of operator operator" in wrong.stderr) == (2, True)
    os.chmod(bundle, 0o644)
    wrong = fleet.run("client", "--task", "tasks:shift", "--credentials", bundle)
    assert (wrong.returncode, "mode 0644" in wrong.stderr) == (2, True)

    printed = (
        "".join(f"{output.stdout}{output.stderr}" for output in outputs)
        + token.stderr
        + wrong.stderr
    )
    printed += "".join(file.read_text() for file in folder.glob("*.log"))
    keys = [folder / "pki" / "ca.key", folder / "pki" / "server.key", *folder.glob("**/*.fleet")]
    secrets = [line for file in keys for line in private_lines(file.read_text())]
    assert len(secrets) >= 5
    parts = token.stdout.strip().split(".")
    for secret in (*secrets, http, parts[2], "PRIVATE KEY"):
        assert secret not in printed
    assert "serving" in printed or "joined" in printed  # the logs are not empty


def private_lines(text: str) -> list[str]:
    """Return the first line of every private key in a file."""
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
        (
            ["client", "--task", "tasks:shift", "-o", "size=3", "--server", "192.0.2.1:8440"],
            "--credentials",
        ),
        (["status", "--server", "192.0.2.1:8440"], "--insecure"),
        (["status", "--credentials", "nowhere.fleet"], "No such file"),
        (["enroll"], "NAME"),
        (["enroll", "a/b"], "1 to 64"),
        (["enroll", "ann", "--pki", "nowhere"], "fairfleet pki init"),
        (["enroll", "ann", "--ttl", "forever"], "for example 90d"),
        (["enroll", "--token", "fft1.x"], "no token"),
        (["enroll", "ann", "--token", "fft1.x"], "leave out NAME"),
    ],
)
def test_mistakes_are_reported_before_anything_is_done(
    tmp_path: Path, words: list[str], message: str
) -> None:
    fleet = Fleet(tmp_path)
    if words[0] == "server":
        words = [
            *words,
            "--model",
            str(fleet.init()),
            "--state-dir",
            str(tmp_path / "state"),
            "--set",
            "http.port=0",
        ]
    done = fleet.run(*words)
    assert done.returncode == 2, done.stderr
    assert message in done.stderr
    assert "Traceback" not in done.stderr
