"""Hosts of one's own: a network namespace for the server and one for each client, joined by virtual cables.

Delay, loss, a slow uplink and partitions are made by the team's `netfault.py`, if it is at hand.
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

from tests.e2e.fleet import PROGRAM, Fleet

SHARED = Path(os.environ.get("FAIRFLEET_SHARED", Path(__file__).resolve().parents[3] / "shared"))
NETFAULT = SHARED / "tools" / "netfault.py"
SERVER = "ff-server"


def needed() -> None:
    if os.getuid() != 0:
        pytest.skip("network namespaces need root")
    if not NETFAULT.exists():
        pytest.skip(f"there is no {NETFAULT.name} beside the checkout; FAIRFLEET_SHARED says where else")
    if subprocess.run(["ip", "netns", "list"], capture_output=True, check=False).returncode != 0:
        pytest.skip("no network namespace can be made here")


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


class Network:
    def __init__(self) -> None:
        self._names: list[str] = []

    def add(self, name: str) -> str:
        """A host with a cable to the server; returns the server's address on it."""
        number = len(self._names)
        self._host(name)
        ip("link", "add", f"eth{number}", "netns", SERVER, "type", "veth", "peer", "name", "eth0", "netns", name)
        for host, end, address in ((SERVER, f"eth{number}", 1), (name, "eth0", 2)):
            ip("-n", host, "address", "add", f"10.77.{number}.{address}/24", "dev", end)
            ip("-n", host, "link", "set", end, "up")
        return f"10.77.{number}.1"

    def _host(self, name: str) -> None:
        ip("netns", "add", name)
        self._names.append(name)
        ip("-n", name, "link", "set", "lo", "up")

    @contextlib.contextmanager
    def made(self) -> Iterator[Network]:
        self._host(SERVER)
        try:
            yield self
        finally:
            for name in self._names:
                subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)

    @contextlib.contextmanager
    def fault(self, name: str, *words: str) -> Iterator[None]:
        command = [sys.executable, NETFAULT, *words, "--netns", name, "--for", "300"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        try:
            assert process.stdout.readline(), "the fault could not be made"  # it says so when it is in place
            yield
            assert process.poll() is None, "the fault did not last"
        finally:
            process.terminate()
            process.wait(20)


class SpreadFleet(Fleet):
    """A fleet whose processes live on hosts of their own."""

    network: Network

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.environment["FAIRFLEET_INSECURE"] = "true"  # nobody else is on these cables

    def host_of(self, name: str) -> str:
        return SERVER if name == "server" else f"ff-{name}"

    @property
    def address(self) -> str:
        return f"0.0.0.0:{self.port}"

    def prefix(self, name: str) -> list[str]:
        return ["ip", "netns", "exec", self.host_of(name)]

    def address_for(self, name: str) -> str:
        return f"{self.network.add(self.host_of(name))}:{self.port}"

    def told(self) -> dict[str, Any]:
        command = [*self.prefix("server"), *PROGRAM, "status", "--json", "--server", f"127.0.0.1:{self.port}"]
        status: dict[str, Any] = json.loads(subprocess.check_output(command, timeout=60))
        return status
