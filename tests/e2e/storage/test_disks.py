"""Full and read-only disks:

acknowledged data stays, the reason is reported, and training resumes.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator

import pytest

from tests.support.fleet import Fleet, until

SIZE = 100_000  # parameters: 400 kB for a model, and as much for an update


@pytest.fixture
def small_disk(fleet: Fleet) -> Iterator[Fleet]:
    """Return a state directory on a separate file system with room for little more than a round."""
    if os.getuid() != 0:
        pytest.skip("mounting a file system needs root")
    fleet.state.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(fleet.state)]
    if subprocess.run(mount, check=False, capture_output=True).returncode != 0:
        pytest.skip("no file system can be mounted here")
    yield fleet
    fleet.end()
    subprocess.run(["umount", "-l", str(fleet.state)], check=False)


def remount(fleet: Fleet, options: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{options}", str(fleet.state)], check=True)


def begin(fleet: Fleet, **settings: object) -> None:
    fleet.start_server(
        rounds=10_000, model=fleet.folder / "model.safetensors", keep_models=3, **settings
    )


def test_a_full_disk_loses_nothing_and_training_resumes_when_there_is_space(
    small_disk: Fleet,
) -> None:
    fleet = small_disk
    fleet.init(SIZE)
    begin(fleet)
    for name, shift in (("a", 1), ("b", 2)):
        fleet.start_client(name, shift=shift)
    fleet.wait_for_version(1)
    filler = fleet.state / "filler"
    with open(filler, "wb", buffering=0) as file:
        try:
            while file.write(bytes(4096)):
                pass
        except OSError:
            pass

    server = fleet.server
    assert server is not None

    # An upload can be retried; a round that cannot be recorded ends the server.
    def refused() -> bool:
        return "cannot write to its disk" in fleet.log("a.log") + fleet.log("b.log")

    until(lambda: server.poll() is not None or refused(), "the full disk to be noticed")
    if server.poll() is None:
        fleet.kill_server()
    else:
        assert server.returncode == 3, fleet.log("server.log")
        assert "can no longer be written to" in fleet.log("server.log")
    filler.unlink()
    remount(fleet, "size=32m")
    begin(fleet)
    fleet.wait_for_version(fleet.version() + 3)
    fleet.kill_server()
    fleet.prove(fleet.version())


def test_a_read_only_state_directory_is_refused_with_the_reason(small_disk: Fleet) -> None:
    fleet = small_disk
    fleet.init(SIZE)
    begin(fleet)
    fleet.kill_server()
    remount(fleet, "ro")
    try:
        done = fleet.run(
            "server",
            "--state-dir",
            str(fleet.state),
            "--listen",
            fleet.address,
            "--set",
            "http.port=0",
        )
    finally:
        remount(fleet, "rw")
    assert done.returncode == 3
    assert "Read-only file system" in done.stderr
    assert "Traceback" not in done.stderr
