from __future__ import annotations

import signal

from tests.e2e.fleet import Fleet, free_port


def test_a_server_that_serves_is_healthy_and_one_that_is_not_there_is_not(fleet: Fleet) -> None:
    fleet.init()
    fleet.start_server()
    done = fleet.run("health", "--server", fleet.address)
    assert (done.returncode, done.stdout) == (0, "serving\n")
    other = f"127.0.0.1:{free_port()}"
    done = fleet.run("health", "--server", other)
    assert done.returncode == 6
    assert f"no server answers at {other}" in done.stderr


def test_a_server_that_hangs_is_not_healthy(fleet: Fleet) -> None:
    fleet.init()
    fleet.start_server()
    assert fleet.server is not None
    fleet.server.send_signal(signal.SIGSTOP)
    done = fleet.run("health", "--server", fleet.address, "--seconds", "0.5")
    assert done.returncode == 6
    assert "within 0.5 s" in done.stderr


def test_an_initial_model_is_kept_where_that_is_wanted_and_never_written_over(fleet: Fleet) -> None:
    model = fleet.init(size=10)
    before = model.read_bytes()
    words = ("init", "--task", "tasks:shift", "-o", "size=20", "--output", str(model))
    assert fleet.run(*words).returncode == 2
    kept = fleet.run(*words, "--keep")
    assert (kept.returncode, kept.stdout) == (0, f"{model}: kept\n")
    assert model.read_bytes() == before
    assert [path.name for path in fleet.folder.iterdir()] == [model.name]
