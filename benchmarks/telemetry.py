"""What being watched costs: rounds of 100 clients with telemetry and without, and how long /metrics takes with 1,000.

    python benchmarks/telemetry.py --json

Real servers in turn, one with everything on (metrics scraped every 5 s, as shipped, an open page with every change
and the conflict map, which it asks for every 2 s) and one with all of it cut out, each with a crowd of light clients
in another process.

`telemetry_cpu_share` is the figure to judge: CPU time noted inside the functions that are telemetry, over the server's
whole CPU time, per round. The differences between the pairs of servers say the same without trust in that list of
functions, but on a machine that does other things they scatter by more than the bar. Bars: under 2 % per round; a
scrape under 50 ms (by default a fleet of 1,000 has no series per client; with them it is another figure).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

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
SERVER = Path(__file__).with_name("telemetry_server.py")


def crowd(address: str, count: int, enough: Any) -> None:
    with Crowd(address, count):
        enough.wait()


class Server:
    """One federation, for as long as the block lasts."""

    def __init__(self, clients: int, params: int, how: str = "with", **settings: Any) -> None:
        self.port, self.http = free_port(), free_port()
        self._clients, self._how, self._params = clients, how, params
        self._settings = {"http.port": self.http, "rounds": 1_000_000, "round.minimum_clients": clients, **settings}

    def __enter__(self) -> Server:
        self._folder = tempfile.TemporaryDirectory()
        folder = Path(self._folder.name)
        Model.of({f"layer{k}": np.zeros(self._params // 10, np.float32) for k in range(10)}).save(
            folder / "m.safetensors"
        )
        words = [sys.executable, str(SERVER), self._how, "server", "--listen", f"127.0.0.1:{self.port}"]
        words += ["--state-dir", str(folder / "state"), "--model", str(folder / "m.safetensors"), "--codec", "raw32"]
        for path, value in self._settings.items():
            words += ["--set", f"{path}={value}"]
        self._spent = folder / "spent"
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self.process = subprocess.Popen(words, env=os.environ | {"SPENT": str(self._spent)}, **quiet)
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

    def end(self) -> float:
        """CPU seconds that its telemetry took."""
        self.process.terminate()
        self.process.wait(60)
        return float(self._spent.read_text())

    def status(self) -> pb.StatusResponse:
        return self._stub.Status(pb.StatusRequest(), timeout=60, wait_for_ready=True)

    def reach(self, version: int) -> tuple[float, float]:
        """CPU seconds so far and the time, once so many rounds are committed."""
        while self.status().version < version:
            time.sleep(0.05)
        return sum(self._watched.cpu_times()[:2]), time.perf_counter()


class PerRound(NamedTuple):
    cpu: float  # seconds
    wall: float
    telemetry: float  # of that CPU


def per_round(how: str, clients: int, params: int, rounds: int) -> PerRound:
    with Server(clients, params, how, **{"round.evaluate_every": 0}) as server:
        with looked_at(server.http) if how == "with" else contextlib.nullcontext():
            cpu, began = server.reach(WARM_UP_ROUNDS)
            version = server.status().version
            cpu_then, then = server.reach(version + rounds)
            last = server.status().version
        telemetry = server.end() / last
    return PerRound((cpu_then - cpu) / (last - version), (then - began) / (last - version), telemetry)


@contextlib.contextmanager
def looked_at(port: int) -> Iterator[None]:
    """Scraped every 5 s, and with the page open, which also asks for the conflict map."""
    over = threading.Event()

    def ask(path: str, seconds: float) -> None:
        while not over.wait(seconds):
            fetch(f"http://127.0.0.1:{port}{path}")

    def look() -> None:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/api/live") as stream:
            while stream.readline() and not over.is_set():
                pass

    for work in (partial(ask, "/metrics", 5.0), partial(ask, "/api/conflicts", 2.0), look):
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
    pairs: list[dict[str, PerRound]] = []
    for repeat in range(repeats):  # in turn, so that a slow minute is everybody's
        order = ("without", "with") if repeat % 2 == 0 else ("with", "without")
        pairs.append({how: per_round(how, clients, params, rounds) for how in order})
    share = statistics.median(pair["with"].telemetry / pair["with"].cpu for pair in pairs)
    plain, named = scrapes(fleet, 100), scrapes(fleet, fleet)
    return {
        "clients": clients,
        "params": params,
        "cpu_ms_per_round_without": 1000 * statistics.median(pair["without"].cpu for pair in pairs),
        "cpu_ms_per_round_with": 1000 * statistics.median(pair["with"].cpu for pair in pairs),
        "added_cpu_share_of_pairs": sorted(round(pair["with"].cpu / pair["without"].cpu - 1, 4) for pair in pairs),
        "added_wall_share_of_pairs": sorted(round(pair["with"].wall / pair["without"].wall - 1, 4) for pair in pairs),
        "telemetry_cpu_ms_per_round": 1000 * statistics.median(pair["with"].telemetry for pair in pairs),
        "telemetry_cpu_share": share,
        "scrape_clients": fleet,
        "scrape_ms": 1000 * plain["seconds"],
        "scrape_bytes": plain["bytes"],
        "scrape_ratio_to_empty_registry": plain["ratio_to_empty_registry"],
        "scrape_ms_with_every_client_named": 1000 * named["seconds"],
        "bars_met": share < BAR_SHARE and plain["seconds"] < BAR_SECONDS,
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
