"""Measure how many clients one server can serve: thousands wait, and some train in each round.

    python benchmarks/load.py --joined 5000 --training 100 --json
    python benchmarks/load.py --joined 5000 --training 100 --tls --json

It starts a real server, and light clients in a few processes. Each client has its own TCP
connection (the server's open sockets are counted), joins and polls. When it is selected, it sends a
small update. Then the server is killed and restarted on its state directory, and the time until
every client is connected again is measured. `kib_per_idle_client` is the growth of the server's
memory per joined client. With --tls, every client has its own certificate (mTLS).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import itertools
import json
import multiprocessing
import os
import random
import resource
import secrets
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import numpy as np
import psutil

from fairfleet.client.agent.pauses import CALL_SECONDS, FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS
from fairfleet.common.chunk_stream import encode, model_pieces
from fairfleet.common.net.channel_options import CLIENT_OPTIONS
from fairfleet.common.pki.certificates import CA_TTL, SERVER_TTL, Authority, KeyPair
from fairfleet.common.pki.identity import Identity, Role
from fairfleet.common.pki.pki_folder import PkiFolder
from fairfleet.common.tensors import Model
from fairfleet.common.wire import (
    ERROR_METADATA,
    PROTOCOL_VERSION,
    TASK_METADATA,
    UPLOAD_METADATA,
    signature_in,
)
from fairfleet.proto.v1 import fleet_pb2 as pb
from fairfleet.proto.v1 import operator_pb2 as op
from fairfleet.proto.v1.fleet_pb2_grpc import FleetStub
from fairfleet.proto.v1.operator_pb2_grpc import OperatorStub

OWN_CONNECTION = [*CLIENT_OPTIONS, ("grpc.use_local_subchannel_pool", 1)]
REPORT = pb.TrainReport(samples=10, loss_before=1.0, loss_after=0.5, steps=1, learning_rate=0.1)
REPEATED = {  # the codes after which the real client repeats a call
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.UNKNOWN,
    grpc.StatusCode.DEADLINE_EXCEEDED,
}
PROCESSES = 2
PARAMETERS = 1000


# ---- light clients -------------------------------------------------------------------------------


class LightClient:
    """A client without data that follows the protocol of the real one."""

    def __init__(self, name: str, address: str, seconds: list[float], ca: KeyPair | None) -> None:
        self.name, self._seconds = name, seconds
        if ca is None:
            self._channel = grpc.aio.insecure_channel(address, options=OWN_CONNECTION)
        else:
            credentials = member_credentials(ca, Identity(Role.CLIENT, name))
            self._channel = grpc.aio.secure_channel(address, credentials, options=OWN_CONNECTION)
        self._stub = FleetStub(self._channel)
        self._instance = secrets.token_hex(4)
        self._session = ""
        self._lost = False  # the server was out of reach
        self.failed = ""

    async def run(self) -> None:
        """Run like the real client, which repeats calls after a jittered pause where allowed."""
        pause = FIRST_PAUSE_SECONDS
        while not self.failed:
            try:
                await self._turn()
                pause = FIRST_PAUSE_SECONDS
            except grpc.RpcError as error:
                self._note(error)
                await asyncio.sleep(random.uniform(0.05, pause))
                pause = min(2 * pause, LONGEST_PAUSE_SECONDS)

    def _note(self, error: Any) -> None:
        code, metadata = error.code(), error.trailing_metadata() or ()
        lost = code is grpc.StatusCode.UNAVAILABLE and not any(
            key == ERROR_METADATA for key, _ in metadata
        )
        self._lost = self._lost or lost
        if lost or code is grpc.StatusCode.UNAUTHENTICATED:
            self._session = ""
        elif code not in REPEATED:
            self.failed = f"{code.name}: {error.details()}"

    async def _turn(self) -> None:
        if not self._session:
            joined = await (
                self._rejoin()
                if self._lost
                else self._timed(self._stub.Join, self._join(), CALL_SECONDS)
            )
            self._session, self._lost = joined.session, False
            self._signature = signature_in(joined.signature)
        response = await self._next_task()
        if response.HasField("train"):
            await self._train(response.train)
        elif response.HasField("wait") and response.wait.retry_after_seconds:
            await asyncio.sleep(response.wait.retry_after_seconds)

    async def _next_task(self) -> pb.NextTaskResponse:
        """Poll like the real client. The answer also contains the model."""
        take: Any = self._channel.unary_stream(
            "/fairfleet.v1.Fleet/TakeTask", pb.TakeTaskRequest.SerializeToString, None
        )
        call = take(pb.TakeTaskRequest(session=self._session))
        async for _ in call:
            pass
        return pb.NextTaskResponse.FromString((await call.trailing_metadata())[TASK_METADATA])

    async def _train(self, task: pb.TrainTask) -> None:
        messages: list[bytes] = []
        update = Model.empty(self._signature)
        update.parameters[:] = random.random()
        encoded = encode(
            model_pieces(update), lambda head, data: messages.append(b"".join((head, data)))
        )
        request = pb.OpenUploadRequest(
            session=self._session,
            round=task.round,
            model_digest=task.model.digest,
            codec="raw32",
            size_bytes=encoded.size_bytes,
            digest=encoded.digest,
            report=REPORT,
        )
        try:
            opened = await self._timed(self._stub.OpenUpload, request, CALL_SECONDS)
            if not opened.HasField("receipt"):
                began = time.perf_counter()
                send: Any = self._channel.stream_unary("/fairfleet.v1.Fleet/SendUpload", None, None)
                await send(iter(messages), metadata=((UPLOAD_METADATA, opened.upload),), timeout=20)
                self._seconds.append(time.perf_counter() - began)
        except grpc.RpcError as error:
            # FAILED_PRECONDITION: the round continued without this update. The client polls again.
            if error.code() is not grpc.StatusCode.FAILED_PRECONDITION:
                raise

    async def _rejoin(self) -> pb.JoinResponse:
        answer: pb.JoinResponse = await self._stub.Join(
            self._join(), timeout=CALL_SECONDS, wait_for_ready=True
        )
        return answer

    async def _timed(self, call: Any, request: Any, seconds: float) -> Any:
        began = time.perf_counter()
        answer = await call(request, timeout=seconds)
        self._seconds.append(time.perf_counter() - began)
        return answer

    def _join(self) -> pb.JoinRequest:
        return pb.JoinRequest(
            client=self.name,
            instance=self._instance,
            protocol_version=PROTOCOL_VERSION,
            codecs=["raw32"],
            train_samples=10,
        )


def member_credentials(ca: KeyPair, identity: Identity) -> grpc.ChannelCredentials:
    """Return credentials with a new certificate of this identity."""
    pair = Authority.of(ca).member(identity)
    return grpc.ssl_channel_credentials(ca.certificate, pair.key, pair.certificate)


def crew(
    first: int, count: int, address: str, ca: KeyPair | None, enough: Any, results: Any
) -> None:
    """Run the clients of one process until `enough` is set; put their results into the queue."""
    asyncio.run(_crew(first, count, address, ca, enough, results))


async def _crew(
    first: int, count: int, address: str, ca: KeyPair | None, enough: Any, results: Any
) -> None:
    """Run clients until they are dismissed, then report the durations of calls and the failures."""
    gc.disable()  # It would scan thousands of clients repeatedly, on cores that the server needs.
    seconds: list[float] = []
    clients = [LightClient(f"client-{first + k:05d}", address, seconds, ca) for k in range(count)]
    running = []
    for k, client in enumerate(clients):
        running.append(asyncio.create_task(client.run()))
        if k % 50 == 49:
            await asyncio.sleep(0.05)  # A fleet does not join all at once.
    await asyncio.to_thread(enough.wait)
    for task in running:
        task.cancel()
    results.put((seconds, [f"{c.name} {c.failed}" for c in clients if c.failed]))


# ---- the server ----------------------------------------------------------------------------------


class Server:
    """A server process, and an operator's connection to it."""

    def __init__(
        self, folder: Path, port: int, joined: int, training: int, ca: KeyPair | None
    ) -> None:
        self._words = [
            sys.executable, "-m", "fairfleet.common.cli", "server", "--listen", f"127.0.0.1:{port}",
            "--state-dir", str(folder / "state"), "--model", str(folder / "model.safetensors"),
            "--rounds", "1000000", "--minimum-clients", str(joined), "--clients", str(training),
            "--set", "round.evaluate_every=0", "--set", f"limits.clients={2 * joined}",
            "--set", "http.port=0",
        ]  # fmt: skip
        address, options = f"127.0.0.1:{port}", [("grpc.use_local_subchannel_pool", 1)]
        if ca is None:
            self._channel = grpc.insecure_channel(address, options=options)
        else:
            self._words += ["--pki", str(folder / "pki")]
            credentials = member_credentials(ca, Identity(Role.OPERATOR, "benchmark"))
            self._channel = grpc.secure_channel(address, credentials, options=options)
        self.operator = OperatorStub(self._channel)
        self.start()

    def start(self) -> None:
        """Start the server, and return when its log says that it is serving.

        A call is no good sign: its answer may come only after the answers to all clients.
        """
        self.process = subprocess.Popen(
            self._words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        self.watched = psutil.Process(self.process.pid)
        assert self.process.stdout is not None
        if not self.process.stdout.readline().startswith("serving on"):
            raise SystemExit("the server did not start")

    def kill(self) -> None:
        """Kill the process without a chance to clean up."""
        self.process.kill()
        self.process.wait(10)

    def status(self) -> op.StatusResponse:
        """Return the status that operators get."""
        answer: op.StatusResponse = self.operator.Status(
            op.StatusRequest(), timeout=60, wait_for_ready=True
        )
        return answer

    def rss_kib(self) -> float:
        """Return the resident memory in KiB."""
        return float(self.watched.memory_info().rss) / 1024

    def sockets(self) -> int:
        """Return the number of established TCP connections."""
        connections = self.watched.net_connections("tcp")
        return sum(connection.status == "ESTABLISHED" for connection in connections)

    def cpu_seconds(self) -> float:
        """Return the CPU time of the process, in user and system mode."""
        return float(sum(self.watched.cpu_times()[:2]))

    def wait_for(self, joined: int, seconds: float) -> float:
        """Wait until this many clients are connected; return the seconds that it took."""
        began = time.perf_counter()
        while time.perf_counter() - began < seconds:
            with contextlib.suppress(grpc.RpcError):
                if self.status().connected >= joined:
                    return time.perf_counter() - began
            time.sleep(0.05)
        raise SystemExit(
            f"only {self.status().connected} of {joined} clients joined within {seconds:g} s"
        )


class Crews:
    """The clients of the fleet, in a few processes."""

    def __init__(self, joined: int, address: str, ca: KeyPair | None) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._enough, self._results = spawn.Event(), spawn.Queue()
        firsts = [joined * k // PROCESSES for k in range(PROCESSES + 1)]
        self._processes = [
            spawn.Process(
                target=crew, args=(first, end - first, address, ca, self._enough, self._results)
            )
            for first, end in itertools.pairwise(firsts)
        ]
        for process in self._processes:
            process.start()

    def cpu_seconds(self) -> float:
        """Return the CPU time of all processes together."""
        return float(
            sum(sum(psutil.Process(process.pid).cpu_times()[:2]) for process in self._processes)
        )

    def dismiss(self) -> tuple[list[float], list[str]]:
        """End the clients; return the sorted durations of calls, and the failures as text."""
        self._enough.set()
        results = [self._results.get(timeout=60) for _ in self._processes]
        durations = sorted(itertools.chain.from_iterable(seconds for seconds, _ in results))
        failures = list(itertools.chain.from_iterable(failed for _, failed in results))
        return durations, failures

    def end(self) -> None:
        """End the processes, by force where necessary."""
        self._enough.set()
        for process in self._processes:
            process.join(10)
            if process.is_alive():
                process.kill()


def make_ca(folder: Path) -> KeyPair:
    """Create a CA like `fairfleet pki init`. Client processes sign their certificates with it."""
    PkiFolder(folder).create(["localhost"], "127.0.0.1:8440", ca_ttl=CA_TTL, server_ttl=SERVER_TTL)
    return KeyPair((folder / "ca.key").read_bytes(), (folder / "ca.crt").read_bytes())


def measure(joined: int, training: int, seconds: float, tls: bool) -> dict[str, Any]:
    """Return the figures of one server and its fleet."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as ends:
        folder, port = Path(name), free_port()
        Model.of({"weight": np.zeros(PARAMETERS, np.float32)}).save(folder / "model.safetensors")
        ca = make_ca(folder / "pki") if tls else None
        server = Server(folder, port, joined, training, ca)
        ends.callback(server.kill)
        empty = server.rss_kib()
        crews = Crews(joined, f"127.0.0.1:{port}", ca)
        ends.callback(crews.end)
        result = {"joined": joined, "training": training, "tls": tls} | measure_joining(
            server, joined, empty
        )
        result |= measure_rounds(server, seconds)
        result |= measure_restart(server, crews, joined)
        answers, failed = crews.dismiss()
    return result | {
        "failed_clients": len(failed),
        "first_failure": failed[0] if failed else "",
        "answer_seconds_median": statistics.median(answers),
        "answer_seconds_p99": answers[int(0.99 * (len(answers) - 1))],
    }


def measure_joining(server: Server, joined: int, empty_kib: float) -> dict[str, Any]:
    """Wait until all clients have joined; return the costs of that."""
    cpu, duration = server.cpu_seconds(), server.wait_for(joined, 300)
    grown, sockets = server.rss_kib() - empty_kib, server.sockets()
    if sockets < joined:
        raise SystemExit(f"{sockets} open sockets for {joined} clients: they shared connections")
    return {
        "server_sockets": sockets,
        "seconds_to_join_all": duration,
        "server_cpu_seconds_to_join_all": server.cpu_seconds() - cpu,
        "kib_per_idle_client": grown / joined,
        "server_rss_mb": (empty_kib + grown) / 1024,
    }


def measure_rounds(server: Server, seconds: float) -> dict[str, Any]:
    """Return the rate of rounds and the server's use of CPU over a period."""
    version, cpu, began = server.status().version, server.cpu_seconds(), time.perf_counter()
    time.sleep(seconds)
    rounds, duration = server.status().version - version, time.perf_counter() - began
    return {
        "rounds_per_second": rounds / duration,
        "server_cpu_share_of_one_core": (server.cpu_seconds() - cpu) / duration,
    }


def measure_restart(server: Server, crews: Crews, joined: int) -> dict[str, Any]:
    """Kill and restart the server; return how long clients need to come back, and the CPU time."""
    server.kill()
    began, busy = time.perf_counter(), crews.cpu_seconds()
    server.start()
    started, cpu = time.perf_counter() - began, server.cpu_seconds()
    rejoin_seconds = server.wait_for(joined, 120)
    busy, cpu = crews.cpu_seconds() - busy, server.cpu_seconds() - cpu
    version = server.status().version
    time.sleep(5)
    return {
        "restart_seconds_to_serve": started,
        "restart_seconds_to_all_back": rejoin_seconds,
        "restart_server_cpu_seconds": cpu,
        "restart_fleet_cpu_seconds": busy,
        "rounds_in_5_seconds_after_restart": server.status().version - version,
    }


def free_port() -> int:
    """Return a TCP port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def main() -> None:
    """Read the arguments, measure, and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--joined", type=int, default=5000)
    parser.add_argument("--training", type=int, default=100)
    parser.add_argument(
        "--seconds", type=float, default=20.0, help="period in which rounds are counted"
    )
    parser.add_argument(
        "--tls", action="store_true", help="use mTLS, with a certificate per client"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    given = parser.parse_args()
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    result = measure(given.joined, given.training, given.seconds, given.tls)
    result = {
        key: round(value, 4) if isinstance(value, float) else value for key, value in result.items()
    }
    if given.json:
        print(json.dumps(result))
    else:
        for key, value in result.items():
            print(f"{key:36} {value}")


if __name__ == "__main__":
    main()
