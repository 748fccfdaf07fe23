"""A network namespace for the server and one for each client, connected by virtual cables.

Delay, loss, a slow uplink and partitions are caused by `netfault.py` of the shared folder.
Tests are skipped where it is missing.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.fleet import PROGRAM, Fleet
from tests.support.paths import SHARED

NETFAULT = SHARED / "tools" / "netfault.py"
SERVER = "ff-server"


def skip_unless_available() -> None:
    """Skip the test where no network namespaces or faults can be created."""
    if os.getuid() != 0:
        pytest.skip("network namespaces need root")
    if not NETFAULT.exists():
        pytest.skip(
            f"{NETFAULT.name} is not in {NETFAULT.parent}; set FAIRFLEET_SHARED to its folder"
        )
    if subprocess.run(["ip", "netns", "list"], capture_output=True, check=False).returncode != 0:
        pytest.skip("network namespaces cannot be created here")


def ip(*words: str) -> None:
    """Run the command `ip`."""
    subprocess.run(["ip", *words], check=True, capture_output=True)


class Network:
    """The hosts of one federation."""

    def __init__(self) -> None:
        self._names: list[str] = []

    def add(self, name: str) -> str:
        """Add a host with a cable to the server, and return the address of the server on it."""
        number = len(self._names)
        self._host(name)
        ip(
            "link",
            "add",
            f"eth{number}",
            "netns",
            SERVER,
            "type",
            "veth",
            "peer",
            "name",
            "eth0",
            "netns",
            name,
        )
        for host, end, address in ((SERVER, f"eth{number}", 1), (name, "eth0", 2)):
            ip("-n", host, "address", "add", f"10.77.{number}.{address}/24", "dev", end)
            ip("-n", host, "link", "set", end, "up")
        return f"10.77.{number}.1"

    def _host(self, name: str) -> None:
        ip("netns", "add", name)
        self._names.append(name)
        ip("-n", name, "link", "set", "lo", "up")

    @contextlib.contextmanager
    def running(self) -> Iterator[Network]:
        """Create the host of the server, and delete all hosts at the end."""
        self._host(SERVER)
        try:
            yield self
        finally:
            for name in self._names:
                subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)

    @contextlib.contextmanager
    def fault(self, name: str, *words: str) -> Iterator[None]:
        """Cause a fault at a host while the block runs."""
        command = [sys.executable, NETFAULT, *words, "--netns", name, "--for", "300"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        try:
            # The tool prints a line when the fault is in effect.
            assert process.stdout.readline(), "the fault could not be caused"
            yield
            assert process.poll() is None, "the fault did not last"
        finally:
            process.terminate()
            process.wait(20)


class SpreadFleet(Fleet):
    """A fleet whose processes run on separate hosts."""

    network: Network

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        # No other process uses these cables.
        self.environment["FAIRFLEET_INSECURE"] = "true"

    def host_of(self, name: str) -> str:
        """Return the namespace of the server or of a client."""
        return SERVER if name == "server" else f"ff-{name}"

    @property
    def address(self) -> str:
        """Where the server listens: at the end of every cable."""
        return f"0.0.0.0:{self.port}"

    def prefix(self, name: str) -> list[str]:
        """Run each process in its namespace."""
        return ["ip", "netns", "exec", self.host_of(name)]

    def address_for(self, name: str) -> str:
        """Add a host for this client, and return the address of the server on its cable."""
        return f"{self.network.add(self.host_of(name))}:{self.port}"

    def status_json(self) -> dict[str, Any]:
        """Return the status as the command prints it, run at the server's host."""
        command = [
            *self.prefix("server"),
            *PROGRAM,
            "status",
            "--json",
            "--server",
            f"127.0.0.1:{self.port}",
        ]
        status: dict[str, Any] = json.loads(subprocess.check_output(command, timeout=60))
        return status
