"""Measure rounds whose training takes no time, compared with bare grpcio streams.

    python benchmarks/transport.py --clients 4 --params 10000000 --rounds 8 --json
    python benchmarks/transport.py --clients 4 --params 1000000 --codec int8 --uplink-mbit 20 --json

It starts a real server and N real client processes on loopback, whose task returns at once, and
measures the time from one committed round to the next. Before and after, in the same run, it moves
the same bytes through bare grpcio streams without decoding, checks or storage: the floor. Seconds
depend on the machine and its load; `ratio_to_floor` is the figure to compare. One set of processes
can be 50 % faster than the next, so the floor is the median over several.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import psutil
from uplink import slow_links

from fairfleet.client.task import Job, Trained
from fairfleet.common.reports import Evaluation, TrainReport
from fairfleet.common.tensors import Arrays, Model
from fairfleet.proto.v1 import operator_pb2 as pb
from fairfleet.proto.v1.operator_pb2_grpc import OperatorStub

CHUNK = 1 << 20
WARM_UP_ROUNDS = 2
FLOOR_CREWS = 2  # before the system, and as many after it
# The server may not listen yet, and a few fast rounds end before grpc's usual second attempt.
FAST_RECONNECT = [
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 100),
]


# ---- the whole system ----------------------------------------------------------------------------


class InstantTask:
    """A task whose training returns at once.

    Two models alternate, so that no update equals the previous one.
    """

    train_samples = 100
    test_samples = 0
    device = "none"

    def __init__(self, params: int) -> None:
        self._params = params
        draw = np.random.default_rng(0)
        self._results = [
            {"weight": draw.standard_normal(params, dtype=np.float32)} for _ in range(2)
        ]
        self._trainings = 0

    def initial_model(self) -> Model:
        """Return a model of zeros."""
        return Model.of({"weight": np.zeros(self._params, np.float32)})

    def train(self, model: Arrays, job: Job) -> Trained:
        """Return one of the two models."""
        report = TrainReport(
            samples=100, loss_before=1.0, loss_after=1.0, steps=1, learning_rate=0.1
        )
        self._trainings += 1
        return Trained(self._results[self._trainings % 2], report)

    def evaluate(self, model: Arrays) -> Evaluation:
        """Refuse: the server asks for no evaluation."""
        raise NotImplementedError("the benchmark never evaluates")


def task(params: str) -> InstantTask:
    """Return the task that clients load."""
    return InstantTask(int(params))


def measure_system(
    clients: int, params: int, rounds: int, durability: str, codec: str, uplink_mbit: float | None
) -> dict[str, float]:
    """Return the figures of real processes, with a limited uplink if one is given."""
    port = free_port()
    links = slow_links(clients, port, uplink_mbit) if uplink_mbit else nullcontext([port] * clients)
    with links as ports:
        return measure_rounds(ports, params, rounds, durability, codec, port)


def measure_rounds(
    ports: list[int], params: int, rounds: int, durability: str, codec: str, port: int
) -> dict[str, float]:
    """Run the rounds. The server listens on `port`; client k connects to `ports[k]`."""
    total, clients = rounds + WARM_UP_ROUNDS, len(ports)
    with tempfile.TemporaryDirectory(dir=os.environ.get("FAIRFLEET_BENCH_DIR")) as folder:
        model = Path(folder, "model.safetensors")
        InstantTask(params).initial_model().save(model)
        crew = [start_client(k, params, ports[k], folder) for k in range(clients)]
        time.sleep(2.0)  # Then the clients wait for the server.
        began = time.perf_counter()
        server = subprocess.Popen(
            [
                *program("server"), "--listen", f"127.0.0.1:{port}",
                "--state-dir", f"{folder}/state", "--model", str(model),
                "--rounds", str(total), "--minimum-clients", str(clients),
                "--durability", durability, "--codec", codec, "--exit-when-finished",
                "--set", "round.evaluate_every=0", "--set", "http.port=0",
            ],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            return watch(server.pid, port, began)
        finally:
            for process in (server, *crew):
                try:
                    process.wait(30)
                except subprocess.TimeoutExpired:
                    process.kill()


def start_client(number: int, params: int, port: int, folder: str) -> subprocess.Popen[bytes]:
    """Start a client process that connects to this port."""
    return subprocess.Popen(
        [
            *program("client"), "--task", "transport:task", "-o", f"params={params}",
            "--name", f"client-{number}", "--server", f"127.0.0.1:{port}",
            "--state-dir", f"{folder}/clients",
        ],
        cwd=Path(__file__).parent, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip


def watch(server: int, port: int, began: float) -> dict[str, float]:
    """Follow the rounds over the Operator service; return times, CPU time and peak memory."""
    process, peak, cpu, commits, first = psutil.Process(server), 0.0, 0.0, [], 0.0
    with grpc.insecure_channel(f"127.0.0.1:{port}", FAST_RECONNECT) as channel:
        grpc.channel_ready_future(channel).result(60)
        for event in OperatorStub(channel).Watch(pb.WatchRequest()):
            if event.WhichOneof("kind") == "round_committed":
                first = first or time.perf_counter() - began
                commits.append(event.unix_seconds)
                peak = max(peak, peak_rss_mb(server))
                cpu = sum(process.cpu_times()[:2])
    gaps = [
        late - early
        for early, late in zip(
            commits[WARM_UP_ROUNDS - 1 :], commits[WARM_UP_ROUNDS:], strict=False
        )
    ]
    return {
        "seconds_per_round": statistics.median(gaps),
        "server_peak_rss_mb": peak,
        "server_cpu_seconds": cpu,
        "start_to_first_round_seconds": first,
    }


def peak_rss_mb(pid: int) -> float:
    """Return the peak resident size of a process in MiB."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) / 1024
    return 0.0


def program(command: str) -> list[str]:
    """Return the words that run a command of FairFleet."""
    return [sys.executable, "-m", "fairfleet.common.cli", command]


def free_port() -> int:
    """Return a TCP port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


# ---- the floor -----------------------------------------------------------------------------------


def floor_client(port: int, size: int, rounds: int, start: Any, done: Any) -> None:
    """Fetch and send this many bytes in every round, between two barriers."""
    channel = grpc.insecure_channel(f"127.0.0.1:{port}")
    fetch = channel.unary_stream("/floor.Floor/Fetch", None, None)
    send = channel.stream_unary("/floor.Floor/Send", None, None)
    update = bytes(size)
    for _ in range(rounds):
        start.wait(60)
        model, offset = bytearray(size), 0
        for chunk in fetch(b""):
            model[offset : offset + len(chunk)] = chunk
            offset += len(chunk)
        send(update[offset : offset + CHUNK] for offset in range(0, size, CHUNK))
        done.wait(120)


async def floor_rounds(clients: int, size: int, rounds: int) -> list[float]:
    """Return the seconds of each round with one set of client processes."""
    chunks = [bytes(min(CHUNK, size - offset)) for offset in range(0, size, CHUNK)]

    async def fetch(request: bytes, context: Any) -> AsyncIterator[bytes]:
        for chunk in chunks:
            yield chunk

    async def send(stream: AsyncIterator[bytes], context: Any) -> bytes:
        row, offset = bytearray(size), 0
        async for chunk in stream:
            row[offset : offset + len(chunk)] = chunk
            offset += len(chunk)
        return b"ok"

    methods = {
        "Fetch": grpc.unary_stream_rpc_method_handler(fetch),
        "Send": grpc.stream_unary_rpc_method_handler(send),
    }
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("floor.Floor", methods),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    spawn = multiprocessing.get_context("spawn")
    start, done = spawn.Barrier(clients + 1), spawn.Barrier(clients + 1)
    crew = [
        spawn.Process(target=floor_client, args=(port, size, rounds, start, done))
        for _ in range(clients)
    ]
    for process in crew:
        process.start()
    times = []
    for _ in range(rounds):
        await asyncio.to_thread(start.wait, 60)
        began = time.perf_counter()
        await asyncio.to_thread(done.wait, 120)
        times.append(time.perf_counter() - began)
    for process in crew:
        process.join(10)
    await server.stop(0)
    return times


def floor_times(clients: int, params: int, rounds: int) -> list[float]:
    """Return the seconds of rounds, except the first ones of each set, in which clients connect."""
    crews = [
        asyncio.run(floor_rounds(clients, 4 * params, rounds + WARM_UP_ROUNDS))
        for _ in range(FLOOR_CREWS)
    ]
    return [seconds for crew in crews for seconds in crew[WARM_UP_ROUNDS:]]


# ---- the report ----------------------------------------------------------------------------------


def main() -> None:
    """Read the arguments, measure, and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--params", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--durability", choices=["update", "round"], default="update")
    parser.add_argument("--codec", default="raw32")
    parser.add_argument(
        "--uplink-mbit",
        type=float,
        help="uplink of each client in megabits per second (default: no limit)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    given = parser.parse_args()
    times = floor_times(given.clients, given.params, given.rounds)
    result: dict[str, Any] = {
        "clients": given.clients,
        "params": given.params,
        "durability": given.durability,
        "codec": given.codec,
        "uplink_mbit": given.uplink_mbit,
        **measure_system(
            given.clients,
            given.params,
            given.rounds,
            given.durability,
            given.codec,
            given.uplink_mbit,
        ),
    }
    floor = statistics.median(times + floor_times(given.clients, given.params, given.rounds))
    result["megabytes_per_second"] = (
        given.clients * 8 * given.params / result["seconds_per_round"] / 1e6
    )
    result["floor_seconds_per_round"] = floor
    result["ratio_to_floor"] = result["seconds_per_round"] / floor
    result = {
        key: round(value, 4) if isinstance(value, float) else value for key, value in result.items()
    }
    if given.json:
        print(json.dumps(result))
    else:
        for key, value in result.items():
            print(f"{key:32} {value}")


if __name__ == "__main__":
    main()
