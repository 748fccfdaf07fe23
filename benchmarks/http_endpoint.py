"""Measure what the server's HTTP endpoint costs: memory, scrape time and CPU time with viewers.

    python benchmarks/http_endpoint.py --json

Every repetition starts a real server without clients and measures it twice: with no viewer, and
with 64 viewers of the page's stream of server-sent events. While it is measured, the federation is
paused and resumed twice a second, so that every viewer gets a message every second. The CPU time of
the messages is the difference between the two measurements. Every line of --json is one object:
one per number of viewers, with medians over the repetitions, then one with ratios.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path
from typing import NamedTuple

import grpc
import numpy as np
import psutil
from load import free_port

from fairfleet.common.tensors import Model
from fairfleet.proto.v1 import operator_pb2 as pb
from fairfleet.proto.v1.operator_pb2_grpc import OperatorStub

VIEWERS = 64  # the default of limits.http_viewers
PAUSE_SECONDS = 0.5
SETTLE_SECONDS = 2.0
REQUEST = b"GET /api/live HTTP/1.1\r\nHost: localhost\r\n\r\n"


class Measurement(NamedTuple):
    """One server with a number of viewers, over one period of time."""

    rss_mib: float
    threads: int
    scrape_seconds: list[float]
    cpu_seconds: float
    messages: int  # server-sent events that all viewers received


class Server:
    """A server process without clients, for as long as the block lasts."""

    def __init__(self) -> None:
        self.port, self.http_port = free_port(), free_port()

    def __enter__(self) -> Server:
        self._folder = tempfile.TemporaryDirectory()
        folder = Path(self._folder.name)
        Model.of({"layer": np.zeros(1000, np.float32)}).save(folder / "model.safetensors")
        # fmt: off
        command = [
            sys.executable, "-m", "fairfleet.common.cli", "server",
            "--listen", f"127.0.0.1:{self.port}",
            "--state-dir", str(folder / "state"),
            "--model", str(folder / "model.safetensors"),
            "--set", f"http.port={self.http_port}",
        ]
        # fmt: on
        self._process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        self.usage = psutil.Process(self._process.pid)
        self._channel = grpc.insecure_channel(f"127.0.0.1:{self.port}")
        self.operator = OperatorStub(self._channel)
        try:
            self.operator.Status(pb.StatusRequest(), timeout=60, wait_for_ready=True)
        except grpc.RpcError:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._channel.close()
        self._process.terminate()
        self._process.wait(30)
        self._folder.cleanup()

    def cpu_seconds(self) -> float:
        """Return the CPU time that the process has used, in user and system mode."""
        times = self.usage.cpu_times()
        return float(times.user + times.system)


class Viewers:
    """Viewers of the live stream, which read in an event loop in a thread of their own."""

    def __init__(self, port: int, count: int) -> None:
        self.messages = 0
        self._port, self._count = port, count
        self._ready = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Viewers:
        self._thread.start()
        if not self._ready.wait(30):
            raise TimeoutError(f"not all of {self._count} viewers got a first message within 30 s")
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._task.cancel)
        self._thread.join(10)

    def _run(self) -> None:
        self._task = self._loop.create_task(self._watch_all())
        with contextlib.suppress(asyncio.CancelledError):
            self._loop.run_until_complete(self._task)
        self._loop.close()

    async def _watch_all(self) -> None:
        first = [asyncio.Event() for _ in range(self._count)]
        viewers = [asyncio.create_task(self._watch(event)) for event in first]
        try:
            await asyncio.gather(*(event.wait() for event in first))
            self._ready.set()
            await asyncio.gather(*viewers, asyncio.Event().wait())  # until it is cancelled
        finally:
            for viewer in viewers:
                viewer.cancel()
            await asyncio.gather(*viewers, return_exceptions=True)

    async def _watch(self, first: asyncio.Event) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port, limit=1 << 20)
        try:
            writer.write(REQUEST)
            while line := await reader.readline():
                if line.startswith(b"data:"):
                    self.messages += 1
                    first.set()
            raise ConnectionError("the server ended a viewer's stream")
        finally:
            writer.close()


@contextlib.contextmanager
def changes(server: Server) -> Iterator[None]:
    """Pause and resume the federation while the block runs, so that there is always news."""
    ended = threading.Event()

    def alternate() -> None:
        while not ended.wait(PAUSE_SECONDS):
            server.operator.Pause(pb.PauseRequest(), timeout=10)
            if not ended.wait(PAUSE_SECONDS):
                server.operator.Resume(pb.ResumeRequest(), timeout=10)

    thread = threading.Thread(target=alternate)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def scrape_seconds(port: int, times: int) -> list[float]:
    """Return how long each scrape of /metrics takes, over a connection that stays open."""
    durations = []
    with contextlib.closing(HTTPConnection("127.0.0.1", port, timeout=30)) as connection:
        for _ in range(times):
            began = time.perf_counter()
            connection.request("GET", "/metrics")
            with connection.getresponse() as answer:
                if answer.status != 200 or not answer.read():
                    raise ConnectionError(f"/metrics answered {answer.status}")
            durations.append(time.perf_counter() - began)
            time.sleep(0.01)
    return durations


def measure(server: Server, viewers: int, scrapes: int, seconds: float) -> Measurement:
    """Measure a server with a number of viewers; CPU time is taken while nothing scrapes."""
    with Viewers(server.http_port, viewers) as watching, changes(server):
        time.sleep(SETTLE_SECONDS)
        durations = scrape_seconds(server.http_port, scrapes)
        cpu_before, messages_before = server.cpu_seconds(), watching.messages
        time.sleep(seconds)
        cpu, messages = server.cpu_seconds() - cpu_before, watching.messages - messages_before
        rss_mib = server.usage.memory_info().rss / (1 << 20)
        return Measurement(rss_mib, server.usage.num_threads(), durations, cpu, messages)


def summary(measurements: list[Measurement], viewers: int) -> dict[str, float]:
    """Return the medians over the repetitions, in the units that the keys name."""
    scrapes = sorted(value for each in measurements for value in each.scrape_seconds)
    return {
        "viewers": viewers,
        "rss_mib": statistics.median(each.rss_mib for each in measurements),
        "threads": statistics.median(each.threads for each in measurements),
        "scrape_p50_ms": 1000 * scrapes[len(scrapes) // 2],
        "scrape_p95_ms": 1000 * scrapes[int(0.95 * len(scrapes))],
        "cpu_seconds": statistics.median(each.cpu_seconds for each in measurements),
        "messages": statistics.median(each.messages for each in measurements),
    }


def results(repeats: int, scrapes: int, seconds: float) -> list[dict[str, float]]:
    """Return what is printed: a line without viewers, one with them, and one with ratios."""
    idle, watched = [], []
    for _ in range(repeats):
        with Server() as server:
            idle.append(measure(server, 0, scrapes, seconds))
            watched.append(measure(server, VIEWERS, scrapes, seconds))
    costs = [
        1000 * (after.cpu_seconds - before.cpu_seconds) / after.messages
        for before, after in zip(idle, watched, strict=True)
    ]
    without, with_viewers = summary(idle, 0), summary(watched, VIEWERS)
    return [
        without,
        with_viewers | {"cpu_seconds_per_1000_events": statistics.median(costs)},
        {
            "ratio_rss_with_viewers_to_without": with_viewers["rss_mib"] / without["rss_mib"],
            "ratio_scrape_p50_with_viewers_to_without": with_viewers["scrape_p50_ms"]
            / without["scrape_p50_ms"],
        },
    ]


def main() -> None:
    """Read the arguments, measure, and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=3, help="servers to start and measure")
    parser.add_argument("--scrapes", type=int, default=200, help="scrapes per measurement")
    parser.add_argument("--seconds", type=float, default=20.0, help="seconds of CPU measurement")
    parser.add_argument("--json", action="store_true", help="print JSON, one object per line")
    arguments = parser.parse_args()
    for line in results(arguments.repeats, arguments.scrapes, arguments.seconds):
        figures = {key: round(value, 4) for key, value in line.items()}
        if arguments.json:
            print(json.dumps(figures))
        else:
            print("\n".join(f"{key:44} {value}" for key, value in figures.items()), end="\n\n")


if __name__ == "__main__":
    main()
