"""What being watched costs: rounds of 100 clients with telemetry and without, and how long /metrics takes with 1,000.

    python benchmarks/telemetry.py --json

Real servers in turn, one with everything on (metrics scraped every 5 s, as shipped, an open page with every change,
the conflict map) and one with all of it cut out, each with a crowd of light clients in another process. The figure to
compare is the server's CPU time per round: it depends less on what else the machine does than the time on the wall,
which is given too. Bars: under 2 % more per round; a scrape under 50 ms. (By default a fleet of 1,000 has no series per
client; with them it is another figure.)
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import psutil
from load import free_port
from prometheus_client import CollectorRegistry, start_http_server

from fairfleet.common.tensors import Model
from fairfleet.lab.crowd import Crowd
from fairfleet.proto.v1 import operator_pb2 as pb
from fairfleet.proto.v1.operator_pb2_grpc import OperatorStub

BAR_SHARE, BAR_SECONDS = 0.02, 0.050
WARM_UP_ROUNDS = 3
WITH = "from fairfleet.common.cli import main; main()"
WITHOUT = """
import contextlib
from fairfleet.server import diagnostics, serve

class Nobody:
    async def start(self): pass
    def of(*_): return None

@contextlib.asynccontextmanager
async def unwatched(coordinator, store, settings):
    yield Nobody(), "nowhere"

serve._monitored = unwatched
diagnostics.ConflictMap = Nobody()
from fairfleet.common.cli import main; main()
"""


def crowd(address: str, count: int, enough: Any) -> None:
    with Crowd(address, count):
        enough.wait()


class Server:
    """One federation, for as long as the block lasts."""

    def __init__(self, clients: int, params: int, program: str = WITH, **settings: Any) -> None:
        self.port, self.http = free_port(), free_port()
        self._clients, self._program, self._params = clients, program, params
        self._settings = {"http.port": self.http, "rounds": 1_000_000, "round.minimum_clients": clients, **settings}

    def __enter__(self) -> Server:
        self._folder = tempfile.TemporaryDirectory()
        folder = Path(self._folder.name)
        Model.of({f"layer{k}": np.zeros(self._params // 10, np.float32) for k in range(10)}).save(
            folder / "m.safetensors"
        )
        words = [sys.executable, "-c", self._program, "server", "--listen", f"127.0.0.1:{self.port}"]
        words += ["--state-dir", str(folder / "state"), "--model", str(folder / "m.safetensors"), "--codec", "raw32"]
        for path, value in self._settings.items():
            words += ["--set", f"{path}={value}"]
        self.process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self._watched = psutil.Process(self.process.pid)
        self._channel = grpc.insecure_channel(f"127.0.0.1:{self.port}")
        self._stub = OperatorStub(self._channel)
        spawn = multiprocessing.get_context("spawn")
        self._enough = spawn.Event()
        self._crowd = spawn.Process(target=crowd, args=(f"127.0.0.1:{self.port}", self._clients, self._enough))
        self.status()
        self._crowd.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait(10)
        self._enough.set()
        self._crowd.join(10)
        if self._crowd.is_alive():
            self._crowd.kill()
        self._channel.close()
        self._folder.cleanup()

    def status(self) -> pb.StatusResponse:
        return self._stub.Status(pb.StatusRequest(), timeout=60, wait_for_ready=True)

    def reach(self, version: int) -> tuple[float, float]:
        """CPU seconds so far and the time, once so many rounds are committed."""
        while self.status().version < version:
            time.sleep(0.05)
        return sum(self._watched.cpu_times()[:2]), time.perf_counter()


def seconds_per_round(program: str, clients: int, params: int, rounds: int) -> tuple[float, float]:
    """Of CPU, and on the wall."""
    with Server(clients, params, program, **{"round.evaluate_every": 0}) as server:
        watching = looked_at(server.http) if program == WITH else contextlib.nullcontext()
        with watching:
            first = server.reach(WARM_UP_ROUNDS)
            version = server.status().version
            last = server.reach(version + rounds)
            done = server.status().version - version
    return (last[0] - first[0]) / done, (last[1] - first[1]) / done


@contextlib.contextmanager
def looked_at(port: int) -> Iterator[None]:
    """Scraped every second, and with the page open."""
    over = threading.Event()

    def scrape() -> None:
        while not over.wait(5.0):
            fetch(f"http://127.0.0.1:{port}/metrics")

    def look() -> None:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/api/live") as stream:
            while stream.readline() and not over.is_set():
                pass

    for work in (scrape, look):
        threading.Thread(target=work, daemon=True).start()
    try:
        yield
    finally:
        over.set()


def fetch(url: str) -> int:
    with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=30) as answer:
        return len(answer.read())
    return 0


def scrape_seconds(url: str, times: int = 50) -> float:
    taken = []
    for _ in range(times):
        began = time.perf_counter()
        fetch(url)
        taken.append(time.perf_counter() - began)
        time.sleep(0.02)
    return statistics.median(taken)


def scrapes(clients: int, series_up_to: int) -> dict[str, float]:
    """With all clients connected and evaluated, and the federation waiting; beside an empty registry."""
    settings = {"rounds": 2, "round.clients": 20, "round.evaluate_every": 1, "http.client_series": series_up_to}
    with Server(clients, 1000, **settings, lease_seconds=300) as server:
        server.reach(2)
        while server.status().phase != pb.PHASE_FINISHED:
            time.sleep(0.2)
        url = f"http://127.0.0.1:{server.http}/metrics"
        size = fetch(url)
        ours = scrape_seconds(url)
    empty, _ = start_http_server(0, "127.0.0.1", CollectorRegistry())
    floor = scrape_seconds(f"http://127.0.0.1:{empty.server_port}/metrics")
    empty.shutdown()
    return {"seconds": ours, "bytes": size, "ratio_to_empty_registry": ours / floor}


def measure(clients: int, params: int, rounds: int, repeats: int, fleet: int) -> dict[str, Any]:
    pairs = []
    for repeat in range(repeats):  # in turn, so that a slow minute is everybody's
        order = (WITHOUT, WITH) if repeat % 2 == 0 else (WITH, WITHOUT)
        found = {program: seconds_per_round(program, clients, params, rounds) for program in order}
        pairs.append((found[WITHOUT], found[WITH]))
    cpu = statistics.median(on[0] / off[0] - 1 for off, on in pairs)
    wall = statistics.median(on[1] / off[1] - 1 for off, on in pairs)
    plain, named = scrapes(fleet, 100), scrapes(fleet, fleet)
    return {
        "clients": clients,
        "params": params,
        "cpu_ms_per_round_without": 1000 * statistics.median(off[0] for off, _ in pairs),
        "cpu_ms_per_round_with": 1000 * statistics.median(on[0] for _, on in pairs),
        "added_cpu_share": cpu,
        "added_wall_share": wall,
        "scrape_clients": fleet,
        "scrape_ms": 1000 * plain["seconds"],
        "scrape_bytes": plain["bytes"],
        "scrape_ratio_to_empty_registry": plain["ratio_to_empty_registry"],
        "scrape_ms_with_every_client_named": 1000 * named["seconds"],
        "bars_met": cpu < BAR_SHARE and plain["seconds"] < BAR_SECONDS,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--params", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--fleet", type=int, default=1000, help="clients connected while /metrics is asked")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    given = parser.parse_args()
    result = measure(given.clients, given.params, given.rounds, given.repeats, given.fleet)
    result = {key: round(value, 4) if isinstance(value, float) else value for key, value in result.items()}
    print(json.dumps(result) if given.json else "\n".join(f"{key:36} {value}" for key, value in result.items()))


if __name__ == "__main__":
    main()
