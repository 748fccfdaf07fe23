"""A real server with narrow limits and a real client that trains throughout, with checks."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest

from tests.support.device import Device
from tests.support.fleet import Fleet, free_port, until
from tests.support.scraping import scrape, series

PARAMETERS = 600_000
ROUNDS_MEANWHILE = 3  # that the honest client must complete during an attack
MIB = 1 << 20
LIMITS = {
    "limits__idle_seconds": 2,
    "limits__handshake_seconds": 2,
    "limits__connections": 120,
    "limits__streams_per_connection": 100,
    "limits__joins_per_minute": 30,
    "limits__joins_at_once": 30,  # devices of several tests join again at every round
    "limits__polls_per_minute": 30,
    "limits__calls_per_minute": 600,
    "limits__uploads_per_client": 2,
    "limits__downloads_per_client": 2,
    "limits__clients": 300,
    "limits__known_clients": 400,
    "limits__http_connections": 12,
    "limits__http_viewers": 2,
    "limits__http_header_bytes": 4096,
    "limits__http_seconds": 2,
}


class Siege:
    def __init__(self, folder: Path, **settings: Any) -> None:
        self.fleet = Fleet(folder)
        self.http_port = free_port()
        self.fleet.init(PARAMETERS)
        usual = {
            "rounds": 1_000_000,
            "round__minimum_clients": 1,
            "round__quorum": 0.01,
            "lease_seconds": 3,
        }
        usual |= {"round__deadline_seconds": 0.5, "http__port": self.http_port, "keep_models": 2}
        usual |= {"compression__clients__packer": "raw32+zstd"}
        self.fleet.start_server(**(usual | LIMITS | settings))
        assert self.fleet.server is not None
        self._process = psutil.Process(self.fleet.server.pid)

    @property
    def address(self) -> str:
        return self.fleet.address

    @property
    def port(self) -> int:
        return self.fleet.port

    def bring_honest_client(self) -> None:
        self.fleet.start_client("honest", step_seconds=0.02, steps=1)
        self.fleet.wait_for_version(5)  # from now on its memory is what it needs

    def rss_mib(self) -> float:
        return float(self._process.memory_info().rss) / MIB

    def forget_peak(self) -> None:
        """Reset the peak that `peak_mib` returns (Linux: proc(5), clear_refs)."""
        Path(f"/proc/{self._process.pid}/clear_refs").write_text("5")

    def peak_mib(self) -> float:
        """Return the largest memory of the server so far, in MiB."""
        status = Path(f"/proc/{self._process.pid}/status").read_text()
        return int(status.split("VmHWM:")[1].split()[0]) / 1024

    def refused(self, reason: str) -> float:
        """Expect a refusal with one of these codes; provide the error's text and metadata."""
        return scrape(self.http_port)[series("fairfleet_refused_total", reason=reason)]

    @contextlib.contextmanager
    def borne(self, growth_mib: float = 24.0) -> Iterator[None]:
        """Check that the server lives and has not grown, and that the client trained meanwhile."""
        before = self.rss_mib()
        self.forget_peak()
        yield
        self.trains_on()
        assert self.peak_mib() - before < max(growth_mib, 48), (
            "at no moment did it hold what was claimed"
        )
        until(
            lambda: self.rss_mib() - before < growth_mib,
            f"{self.rss_mib() - before:.1f} MiB to be given back",
            20,
        )

    def trains_on(self) -> None:
        version = self.fleet.version()
        self.fleet.wait_for_version(version + ROUNDS_MEANWHILE)

    def end(self) -> None:
        server, honest = self.fleet.server, self.fleet.clients.get("honest")
        log = self.fleet.log("server.log")
        try:
            assert server is not None
            assert server.poll() is None, log
            assert honest is None or honest.poll() in (None, 0), self.fleet.log("honest.log")
            if honest is not None:
                said = self.fleet.log("honest.log")
                assert "joined" in said
                assert "requests a pause" not in said, "limits are not for those who do their work"
            assert "Traceback" not in log, log[log.index("Traceback") :][:5000]
        finally:
            self.fleet.end()


@contextlib.contextmanager
def refused(*codes: grpc.StatusCode) -> Iterator[dict[str, str]]:
    """Return the number of refusals, as the server counts them."""
    found: dict[str, str] = {}
    with pytest.raises(grpc.RpcError) as caught:
        yield found
    error: Any = caught.value
    assert error.code() in codes, f"{error.code()}: {error.details()}"
    found.update(
        {entry.key: entry.value for entry in error.trailing_metadata() or ()},
        details=error.details() or "",
    )


def calls_until_refused(call: Callable[[], object], most: int) -> tuple[int, Any]:
    """Return the number of accepted calls, and the error of the first refused one."""
    for count in range(most):
        try:
            call()
        except grpc.RpcError as error:
            return count, error
    raise AssertionError(f"{most} calls went through")


def rejoin_for_task(device: Device, **fields: Any) -> Device:
    """Join again and get a task of the current round; the honest client trains all the time."""
    device.join(instance="the same", **fields)
    device.train_task()
    return device


def some_bytes(dice: random.Random, most: int) -> bytes:
    return dice.randbytes(dice.randrange(1, most))
