"""Starts, kills and watches the processes of one federation, and proves from its records what its model must be."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from fairfleet.common.tensors import Model
from fairfleet.proto.v1 import operator_pb2 as pb
from fairfleet.proto.v1.operator_pb2_grpc import OperatorStub
from fairfleet.server.faults import VARIABLE

HERE = Path(__file__).parent
PROGRAM = [sys.executable, "-m", "fairfleet.common.cli"]
PATIENCE_SECONDS = 60.0
OWN_CONNECTION = [("grpc.use_local_subchannel_pool", 1)]  # not one that an earlier channel had to a dead server


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def until(condition: Callable[[], Any], what: str, seconds: float = PATIENCE_SECONDS) -> Any:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if found := condition():
            return found
        time.sleep(0.01)
    raise AssertionError(f"waited {seconds:g} s in vain for {what}")


class Fleet:
    def __init__(self, folder: Path) -> None:
        self._started: list[subprocess.Popen[str]] = []
        self.folder = folder
        self.state = folder / "state"
        self.port = free_port()
        self.server: subprocess.Popen[str] | None = None
        self.clients: dict[str, subprocess.Popen[str]] = {}
        self.options: dict[str, dict[str, Any]] = {}
        self.size = 1000
        self.program = PROGRAM
        self.environment: dict[str, str] = {}  # of every process, beside that of the tests
        self._channels: list[grpc.Channel] = []

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    # ---- processes -----------------------------------------------------------------------------

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        command = [*PROGRAM, *words]
        return subprocess.run(command, cwd=HERE, text=True, capture_output=True, timeout=PATIENCE_SECONDS, check=False)

    def init(self, size: int = 1000, task: str = "shift") -> Path:
        self.size = size
        model = self.folder / "model.safetensors"
        done = self.run("init", "--task", f"tasks:{task}", "-o", f"size={size}", "--output", str(model))
        assert done.returncode == 0, done.stderr
        return model

    def start_server(self, die_at: int | str = "", **settings: Any) -> None:
        """`settings` by their path, a double underscore for the dot; `die_at`: at which fault point it kills itself."""
        words = ["server", "--listen", self.address, "--state-dir", str(self.state)]
        if die_at or not self.state.exists():
            words += ["--model", str(self.folder / "model.safetensors")]
        defaults = {"http__port": 0, "rounds": 5, "lease_seconds": 5, "codec": "raw32"}  # whose results are exact
        defaults |= {"round__minimum_clients": 2, "round__evaluate_every": 0}
        for path, value in (defaults | settings).items():
            words += ["--set", f"{path.replace('__', '.')}={value}"]
        self.server = self._start(words, "server.log", {VARIABLE: str(die_at)} if die_at else {})
        if die_at:
            return
        assert self.server.stdout is not None
        line = self.server.stdout.readline()
        assert line.startswith("serving on"), self.log("server.log")

    def die_everywhere(self, numbers: Iterable[int], points: Iterable[str], **settings: Any) -> None:
        """Lets a server die at each of the numbered fault points, then at those of `points` that no number met.

        Where a number leads depends on when the clients come back; a name always leads there.
        """
        for number in numbers:
            self._die_at(number, settings)
        for point in points:
            if not re.search(f"dying on purpose after: {point}", self.log("server.log")):
                self._die_at(point, settings)

    def _die_at(self, where: int | str, settings: dict[str, Any]) -> None:
        self.start_server(die_at=where, **settings)
        assert self.server is not None
        assert self.server.wait(60) == -9, where

    def start_client(self, name: str, *flags: str, task: str = "shift", **options: Any) -> subprocess.Popen[str]:
        usual = {} if task == "quadratic" else {"shift": 1, "samples": 10}
        self.options[name] = {**usual, "size": self.size} | options
        words = ["client", "--task", f"tasks:{task}", *self.identity_of(name), *flags]
        words += ["--state-dir", str(self.folder / "clients")]
        for key, value in self.options[name].items():
            words += ["-o", f"{key}={value}"]
        self.clients[name] = self._start(words, f"{name}.log")
        return self.clients[name]

    def _start(self, words: list[str], log: str, environment: dict[str, str] | None = None) -> subprocess.Popen[str]:
        file = open(self.folder / log, "a")  # noqa: SIM115  # the process keeps it
        env = os.environ | self.environment | (environment or {})
        command = [*self.prefix(log.removesuffix(".log")), *self.program, *words]
        process = subprocess.Popen(command, cwd=HERE, text=True, stdout=subprocess.PIPE, stderr=file, env=env)
        self._started.append(process)
        return process

    def prefix(self, name: str) -> list[str]:
        """What stands before a process's command: here nothing."""
        return []

    def identity_of(self, name: str) -> list[str]:
        """By which flags a client knows who it is and where the server is."""
        return ["--name", name, "--server", self.address_for(name)]

    def address_for(self, name: str) -> str:
        """Where this client finds the server."""
        return self.address

    def kill_server(self) -> None:
        assert self.server is not None
        self.server.kill()
        self.server.wait(10)

    def stop_server(self) -> int:
        assert self.server is not None
        self.server.send_signal(signal.SIGTERM)
        return self.server.wait(20)

    def kill_client(self, name: str) -> None:
        self.clients[name].kill()
        self.clients[name].wait(10)

    def wait_clients(self, seconds: float = PATIENCE_SECONDS) -> dict[str, int]:
        return {name: process.wait(seconds) for name, process in self.clients.items()}

    def end(self) -> None:
        for channel in self._channels:
            channel.close()  # one that is left open can keep the interpreter from ending
        for process in (*self.clients.values(), self.server):
            if process is not None and process.poll() is None:
                process.kill()
                process.wait(10)
        for process in self._started:  # also those that a test has killed or replaced: their pipes are still open
            if process.stdout is not None:
                process.stdout.close()

    def log(self, name: str) -> str:
        return (self.folder / name).read_text()

    # ---- what it says --------------------------------------------------------------------------

    def channel(self) -> grpc.Channel:
        """An operator's."""
        return grpc.insecure_channel(self.address, OWN_CONNECTION)

    def operator(self) -> OperatorStub:
        channel = self.channel()
        self._channels.append(channel)
        grpc.channel_ready_future(channel).result(20)
        return OperatorStub(channel)

    def status(self) -> pb.StatusResponse:
        with self.channel() as channel:
            return OperatorStub(channel).Status(pb.StatusRequest(), timeout=10, wait_for_ready=True)

    def version(self) -> int:
        """The newest committed version, from the database: also while no server runs."""
        rows = self.query("select max(version) from models")
        return int(rows[0][0] or 0)

    def wait_for_version(self, version: int, seconds: float = PATIENCE_SECONDS) -> None:
        until(lambda: self.version() >= version, f"version {version}", seconds)

    def watch(self) -> list[pb.Event]:
        """Events from now on; the list grows in the background until the server ends."""
        events: list[pb.Event] = []
        stub = self.operator()

        def read() -> None:
            with contextlib.suppress(grpc.RpcError):
                for event in stub.Watch(pb.WatchRequest()):
                    events.append(event)

        threading.Thread(target=read, daemon=True).start()
        return events

    # ---- what is on the disk -------------------------------------------------------------------

    def query(self, sql: str) -> list[tuple[Any, ...]]:
        with contextlib.closing(sqlite3.connect(f"file:{self.state / 'federation.db'}?mode=ro", uri=True)) as database:
            return database.execute(sql).fetchall()

    def change(self, sql: str) -> None:
        """What no server of today would write; while none runs."""
        with contextlib.closing(sqlite3.connect(self.state / "federation.db")) as database, database:
            assert database.execute(sql).rowcount > 0

    def model(self, version: int) -> Model:
        (file,) = self.query(f"select file from models where version = {version}")[0]
        return Model.load(self.state / file)[0]

    def records(self) -> list[dict[str, Any]]:
        return [json.loads(text) for (text,) in self.query("select record from rounds order by round")]

    def prove(self, rounds: int) -> None:
        """Every round was committed once, of updates for that round, and the model is their sum and nothing else."""
        records = self.records()
        assert [record["round"] for record in records] == list(range(rounds))
        stored = {(number, client) for number, client in self.query("select round, client from updates")}
        expected, largest = np.float64(0), 0
        for record in records:
            contributions = {c["client"]: c["weight"] for c in record["contributions"]}
            assert len(contributions) == len(record["contributions"])
            assert {(record["round"], client) for client in contributions} <= stored
            assert abs(sum(contributions.values()) - 1) < 1e-12
            expected += sum(weight * self.options[client]["shift"] for client, weight in contributions.items())
            largest += max(self.options[client]["samples"] for client in contributions)
        counted = {(record["round"], c["client"]) for record in records for c in record["contributions"]}
        assert {(number, client) for number, client in stored if number < rounds} == counted
        model = self.model(rounds)
        np.testing.assert_allclose(model.parameters, -expected, rtol=1e-5)
        assert model.counters[0] == largest
        last = {c["client"]: c["weight"] for c in records[-1]["contributions"]}
        mean = sum(weight * self.options[client]["shift"] for client, weight in last.items())
        np.testing.assert_allclose(model.buffers, mean, rtol=1e-6)
        digest = self.query(f"select digest from models where version = {rounds}")[0][0]
        assert digest == records[-1]["digest"]
