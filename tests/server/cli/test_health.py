"""`fairfleet health` and `fairfleet init` as processes."""

from __future__ import annotations

import signal

import pytest

from tests.support.fleet import Fleet, free_port


def test_a_serving_server_is_healthy_and_a_missing_one_is_not(fleet: Fleet) -> None:
    fleet.init()
    fleet.start_server()
    done = fleet.run("health", "--server", fleet.address)
    assert (done.returncode, done.stdout) == (0, "serving\n")
    unused_address = f"127.0.0.1:{free_port()}"
    done = fleet.run("health", "--server", unused_address)
    assert done.returncode == 6
    assert f"no server answers at {unused_address}" in done.stderr


def test_the_check_uses_the_listen_address_and_no_proxy(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The environment of a container names both."""
    fleet.init()
    fleet.start_server()
    monkeypatch.setenv("FAIRFLEET_LISTEN", f"0.0.0.0:{fleet.port}")
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{free_port()}")
    monkeypatch.delenv("no_proxy", raising=False)
    done = fleet.run("health")
    assert (done.returncode, done.stdout) == (0, "serving\n")


def test_the_check_of_a_tls_server_on_all_interfaces_uses_credentials(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This is the case in a container. No certificate names 0.0.0.0."""
    pki = fleet.folder / "pki"
    assert fleet.run("pki", "init", "server", "--pki", str(pki)).returncode == 0
    fleet.init()
    fleet.start_server(pki=pki)
    monkeypatch.setenv("FAIRFLEET_LISTEN", f"0.0.0.0:{fleet.port}")
    assert fleet.run("health").returncode == 6
    monkeypatch.setenv("FAIRFLEET_CREDENTIALS", str(pki / "operator.fleet"))
    done = fleet.run("health")
    assert (done.returncode, done.stdout) == (0, "serving\n")


def test_a_server_that_hangs_is_not_healthy(fleet: Fleet) -> None:
    fleet.init()
    fleet.start_server()
    assert fleet.server is not None
    fleet.server.send_signal(signal.SIGSTOP)
    done = fleet.run("health", "--server", fleet.address, "--seconds", "0.5")
    assert done.returncode == 6
    assert "within 0.5 s" in done.stderr


def test_init_keeps_an_existing_model_with_keep_and_never_overwrites_it(fleet: Fleet) -> None:
    model = fleet.init(size=10)
    before = model.read_bytes()
    words = ("init", "--task", "tasks:shift", "-o", "size=20", "--output", str(model))
    assert fleet.run(*words).returncode == 2
    second = fleet.run(*words, "--keep")
    assert (second.returncode, second.stdout) == (0, f"{model}: kept\n")
    assert model.read_bytes() == before
    assert [path.name for path in fleet.folder.iterdir()] == [model.name]


def test_a_model_that_cannot_be_written_is_explained(fleet: Fleet) -> None:
    output = fleet.folder / "missing" / "model.safetensors"
    done = fleet.run("init", "--task", "tasks:shift", "--output", str(output))
    assert done.returncode == 2
    assert f"cannot write {output}: No such file or directory" in done.stderr
