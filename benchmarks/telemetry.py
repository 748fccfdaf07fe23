"""Measure the cost of telemetry: rounds of 100 clients with and without, /metrics with 1,000.

    python benchmarks/telemetry.py --json

Real servers run alternately, with and without telemetry, each with simulated clients in another
process. With telemetry, metrics are scraped every 5 s, as shipped; a page is open, gets every
change, and requests the conflict map every 2 s. Without telemetry, all of it is switched off.

`telemetry_cpu_share` is the figure to compare: the CPU time inside the functions that are
telemetry, divided by the CPU time of the server, per round. The differences between the pairs of
servers measure the same and do not depend on that list of functions. On a machine with other work
they vary by more than the bar. The bars are 2 % per round, and 50 ms per scrape. By default a fleet
of 1,000 has no series per client; the scrape with them is a separate figure.
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
from simulated_clients import SimulatedClients

from fairfleet.common.tensors import Model
from fairfleet.proto.v1 import operator_pb2 as pb
from fairfleet.proto.v1.operator_pb2_grpc import OperatorStub

BAR_SHARE, BAR_SECONDS = 0.02, 0.050
WARM_UP_ROUNDS = 3
SERVER = Path(__file__).with_name("telemetry_server.py")


def run_clients(address: str, count: int, enough: Any) -> None:
    """Run simulated clients until the event `enough` is set."""
    with SimulatedClients(address, count):
        enough.wait()


class Server:
    """A server and its clients, for as long as a `with` block lasts."""

    def __init__(self, clients: int, params: int, mode: str = "with", **settings: Any) -> None:
        self.port, self.http = free_port(), free_port()
        self._client_count, self._mode, self._params = clients, mode, params
        self._settings = {
            "http.port": self.http,
            "rounds": 1_000_000,
            "round.minimum_clients": clients,
            **settings,
        }

    def __enter__(self) -> Server:
        self._folder = tempfile.TemporaryDirectory()
        folder = Path(self._folder.name)
        Model.of({f"layer{k}": np.zeros(self._params // 10, np.float32) for k in range(10)}).save(
            folder / "m.safetensors"
        )
        words = [
            sys.executable,
            str(SERVER),
            self._mode,
            "server",
            "--listen",
            f"127.0.0.1:{self.port}",
        ]
        words += [
            "--state-dir",
            str(folder / "state"),
            "--model",
            str(folder / "m.safetensors"),
            "--codec",
            "raw32",
        ]
        for path, value in self._settings.items():
            words += ["--set", f"{path}={value}"]
        self._spent = folder / "spent"
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self.process = subprocess.Popen(
            words, env=os.environ | {"SPENT": str(self._spent)}, **quiet
        )
        self._watched = psutil.Process(self.process.pid)
        self._channel = grpc.insecure_channel(f"127.0.0.1:{self.port}")
        self._stub = OperatorStub(self._channel)
        spawn = multiprocessing.get_context("spawn")
        self._enough = spawn.Event()
        self._clients = spawn.Process(
            target=run_clients,
            args=(f"127.0.0.1:{self.port}", self._client_count, self._enough),
        )
        self.status()
        self._clients.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait(10)
        self._enough.set()
        self._clients.join(10)
        if self._clients.is_alive():
            self._clients.kill()
        self._channel.close()
        self._folder.cleanup()

    def end(self) -> float:
        """Stop the server; return the CPU seconds of its telemetry."""
        self.process.terminate()
        self.process.wait(60)
        return float(self._spent.read_text())

    def status(self) -> pb.StatusResponse:
        """Return the status that operators get."""
        return self._stub.Status(pb.StatusRequest(), timeout=60, wait_for_ready=True)

    def reach(self, version: int) -> tuple[float, float]:
        """Wait for this many committed rounds; return the CPU seconds so far, and the clock."""
        while self.status().version < version:
            time.sleep(0.05)
        return sum(self._watched.cpu_times()[:2]), time.perf_counter()


class PerRound(NamedTuple):
    """Costs of one round, in seconds."""

    cpu: float
    wall: float
    telemetry: float  # part of cpu


def per_round(mode: str, clients: int, params: int, rounds: int) -> PerRound:
    """Return the costs per round of a server, `with` or `without` telemetry."""
    with Server(clients, params, mode, **{"round.evaluate_every": 0}) as server:
        with viewers(server.http) if mode == "with" else contextlib.nullcontext():
            first_cpu, began = server.reach(WARM_UP_ROUNDS)
            first = server.status().version
            last_cpu, ended = server.reach(first + rounds)
            last = server.status().version
        telemetry = server.end() / last
    count = last - first
    return PerRound((last_cpu - first_cpu) / count, (ended - began) / count, telemetry)


@contextlib.contextmanager
def viewers(port: int) -> Iterator[None]:
    """Scrape every 5 s and keep the page open, which also requests the conflict map."""
    over = threading.Event()

    def poll(path: str, seconds: float) -> None:
        while not over.wait(seconds):
            fetch(f"http://127.0.0.1:{port}{path}")

    def watch() -> None:
        with (
            contextlib.suppress(OSError),
            urllib.request.urlopen(f"http://127.0.0.1:{port}/api/live") as stream,
        ):
            while stream.readline() and not over.is_set():
                pass

    for work in (partial(poll, "/metrics", 5.0), partial(poll, "/api/conflicts", 2.0), watch):
        threading.Thread(target=work, daemon=True).start()
    try:
        yield
    finally:
        over.set()


def fetch(url: str) -> int:
    """Return the size of a page in bytes; 0 if there is no answer."""
    with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=30) as answer:
        return len(answer.read())
    return 0


def scrape_seconds(url: str, times: int = 50) -> float:
    """Return the median time of a request."""
    durations = []
    for _ in range(times):
        began = time.perf_counter()
        fetch(url)
        durations.append(time.perf_counter() - began)
        time.sleep(0.02)
    return statistics.median(durations)


def scrapes(clients: int, series_up_to: int) -> dict[str, float]:
    """Measure scrapes of an idle federation with all clients evaluated.

    The ratio is to scrapes of an empty registry.
    """
    settings = {
        "rounds": 2,
        "round.clients": 20,
        "round.evaluate_every": 1,
        "http.client_series": series_up_to,
    }
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
    """Return all figures, as medians over the pairs of servers."""
    pairs: list[dict[str, PerRound]] = []
    for repeat in range(repeats):  # Both in turn, so that a slow minute affects both.
        order = ("without", "with") if repeat % 2 == 0 else ("with", "without")
        pairs.append({mode: per_round(mode, clients, params, rounds) for mode in order})
    share = statistics.median(pair["with"].telemetry / pair["with"].cpu for pair in pairs)
    plain, named = scrapes(fleet, 100), scrapes(fleet, fleet)
    return {
        "clients": clients,
        "params": params,
        "cpu_ms_per_round_without": 1000 * statistics.median(pair["without"].cpu for pair in pairs),
        "cpu_ms_per_round_with": 1000 * statistics.median(pair["with"].cpu for pair in pairs),
        "added_cpu_share_of_pairs": sorted(
            round(pair["with"].cpu / pair["without"].cpu - 1, 4) for pair in pairs
        ),
        "added_wall_share_of_pairs": sorted(
            round(pair["with"].wall / pair["without"].wall - 1, 4) for pair in pairs
        ),
        "telemetry_cpu_ms_per_round": 1000
        * statistics.median(pair["with"].telemetry for pair in pairs),
        "telemetry_cpu_share": share,
        "scrape_clients": fleet,
        "scrape_ms": 1000 * plain["seconds"],
        "scrape_bytes": plain["bytes"],
        "scrape_ratio_to_empty_registry": plain["ratio_to_empty_registry"],
        "scrape_ms_with_every_client_named": 1000 * named["seconds"],
        "bars_met": share < BAR_SHARE and plain["seconds"] < BAR_SECONDS,
    }


def main() -> None:
    """Read the arguments, measure, and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--params", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--fleet", type=int, default=1000, help="connected clients when /metrics is scraped"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    given = parser.parse_args()
    result = measure(given.clients, given.params, given.rounds, given.repeats, given.fleet)
    result = {
        key: round(value, 4) if isinstance(value, float) else value for key, value in result.items()
    }
    print(
        json.dumps(result)
        if given.json
        else "\n".join(f"{key:36} {value}" for key, value in result.items())
    )


if __name__ == "__main__":
    main()
