"""Starts, kills and watches the processes of a federation, and derives its model from records."""

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
from typing import Any, NamedTuple

import grpc
import numpy as np

from fairfleet.common.tensors import Model
from fairfleet.proto.v1 import operator_pb2 as pb
from fairfleet.proto.v1.operator_pb2_grpc import OperatorStub
from fairfleet.server.storage.crash_points import VARIABLE
from tests.support.program import ForkedProgram, run_forked

Process = subprocess.Popen[str] | ForkedProgram
HERE = Path(__file__).parent
PROGRAM = [sys.executable, "-m", "fairfleet.common.cli"]
PATIENCE_SECONDS = 60.0
OWN_CONNECTION = [
    ("grpc.use_local_subchannel_pool", 1)
]  # not the connection of an earlier channel to a dead server


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def until(condition: Callable[[], Any], what: str, seconds: float = PATIENCE_SECONDS) -> Any:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if result := condition():
            return result
        time.sleep(0.01)
    raise AssertionError(f"waited {seconds:g} s in vain for {what}")


class Installation(NamedTuple):
    """A version of FairFleet that is installed in an environment of its own."""

    python: Path
    folder: Path  # the folder of the processes, whose tasks.py has the tasks

    @property
    def program(self) -> list[str]:
        return [str(self.python), "-m", "fairfleet.common.cli"]

    @property
    def environment(self) -> dict[str, str]:
        """Return variables that hide this version from the processes."""
        return {"PYTHONPATH": "", "PYTHONHOME": "", "VIRTUAL_ENV": ""}


class Fleet:
    def __init__(self, folder: Path) -> None:
        self._started: list[Process] = []
        self.folder = folder
        self.state = folder / "state"
        self.port = free_port()
        self.server: Process | None = None
        self.clients: dict[str, Process] = {}
        self.options: dict[str, dict[str, Any]] = {}
        self.size = 1000
        self.program = PROGRAM
        self.environment: dict[str, str] = {}  # added to the environment of every process
        self.installations: dict[
            str, Installation
        ] = {}  # by client, or "server"; the others are of this version
        self._channels: list[grpc.Channel] = []

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    # ---- processes -----------------------------------------------------------------------------

    def run(
        self, *words: str, installation: Installation | None = None
    ) -> subprocess.CompletedProcess[str]:
        if installation is None:
            return run_forked(words, HERE, os.environ, PATIENCE_SECONDS)
        program, folder, environment = _started_with(PROGRAM, installation)
        return subprocess.run(
            [*program, *words],
            cwd=folder,
            env=os.environ | environment,
            text=True,
            capture_output=True,
            timeout=PATIENCE_SECONDS,
            check=False,
        )

    def init(self, size: int = 1000, task: str = "shift") -> Path:
        self.size = size
        model = self.folder / "model.safetensors"
        done = self.run(
            "init", "--task", task_spec(task), "-o", f"size={size}", "--output", str(model)
        )
        assert done.returncode == 0, done.stderr
        return model

    def start_server(self, die_at: int | str = "", **settings: Any) -> None:
        """Start the server; `settings` are by path, with two underscores for the dot.

        `die_at` is the crash point at which it kills itself.
        """
        words = ["server", "--listen", self.address, "--state-dir", str(self.state)]
        if die_at or not self.state.exists():
            words += ["--model", str(self.folder / "model.safetensors")]
        defaults = {
            "http__port": 0,
            "rounds": 5,
            "lease_seconds": 5,
            "codec": "raw32",
        }  # whose results are exact
        defaults |= {"round__minimum_clients": 2, "round__evaluate_every": 0}
        for path, value in (defaults | settings).items():
            words += ["--set", f"{path.replace('__', '.')}={value}"]
        self.server = self._start(words, "server.log", {VARIABLE: str(die_at)} if die_at else {})
        if die_at:
            return
        assert self.server.stdout is not None
        line = self.server.stdout.readline()
        assert line.startswith("serving on"), self.log("server.log")

    def die_everywhere(
        self, numbers: Iterable[int], points: Iterable[str], **settings: Any
    ) -> None:
        """Let a server die at each numbered crash point, then at those of `points` not yet reached.

        The point of a number depends on when clients reconnect; a name always means one point.
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

    def start_client(self, name: str, *flags: str, task: str = "shift", **options: Any) -> Process:
        usual = {} if task == "quadratic" else {"shift": 1, "samples": 10}
        self.options[name] = {**usual, "size": self.size} | options
        words = ["client", "--task", task_spec(task), *self.identity_of(name), *flags]
        words += ["--state-dir", str(self.folder / "clients")]
        for key, value in self.options[name].items():
            words += ["-o", f"{key}={value}"]
        self.clients[name] = self._start(words, f"{name}.log")
        return self.clients[name]

    def client_folder(self, name: str) -> Path:
        """Return the folder of a client that has joined one federation."""
        (folder,) = (self.folder / "clients" / name).glob("*-*-*-*-*")
        return folder

    def start_command(self, name: str, *words: str) -> Process:
        """Start an operator's command, in the version of `installations[name]`.

        Its errors go to the log `name`.
        """
        return self._start([*words, "--server", self.address], f"{name}.log")

    def _start(
        self, words: list[str], log: str, environment: dict[str, str] | None = None
    ) -> Process:
        file = open(self.folder / log, "a")  # noqa: SIM115  # the process keeps it
        name = log.removesuffix(".log")
        program, folder, own = _started_with(self.program, self.installations.get(name))
        env = os.environ | own | self.environment | (environment or {})
        process: Process
        prefix = self.prefix(name)
        if program is PROGRAM and not prefix:
            process = ForkedProgram(words, folder, env, file)
        else:
            process = subprocess.Popen(
                [*prefix, *program, *words],
                cwd=folder,
                text=True,
                stdout=subprocess.PIPE,
                stderr=file,
                env=env,
            )
        self._started.append(process)
        return process

    def prefix(self, name: str) -> list[str]:
        """Return the prefix of a process's command: nothing by default."""
        return []

    def identity_of(self, name: str) -> list[str]:
        """Return the flags with a client's identity and the server's address."""
        return ["--name", name, "--server", self.address_for(name)]

    def address_for(self, name: str) -> str:
        """Return where this client finds the server."""
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
            channel.close()  # an open channel can keep the interpreter from ending
        for process in (
            self._started
        ):  # also those that a test has killed or replaced: their pipes are still open
            if process.poll() is None:
                process.kill()
                process.wait(10)
            if process.stdout is not None:
                process.stdout.close()

    def log(self, name: str) -> str:
        return (self.folder / name).read_text()

    # ---- status and events ---------------------------------------------------------------------

    def channel(self) -> grpc.Channel:
        """Return a channel of an operator."""
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
        """Return the newest committed version from the database, also while no server runs."""
        rows = self.query("select max(version) from models")
        return int(rows[0][0] or 0)

    def wait_for_version(self, version: int, seconds: float = PATIENCE_SECONDS) -> None:
        until(lambda: self.version() >= version, f"version {version}", seconds)

    def watch(self) -> list[pb.Event]:
        """Return the list of events from now on, which grows until the server ends."""
        events: list[pb.Event] = []
        stub = self.operator()

        def read() -> None:
            with contextlib.suppress(grpc.RpcError):
                for event in stub.Watch(pb.WatchRequest()):
                    events.append(event)

        threading.Thread(target=read, daemon=True).start()
        return events

    # ---- stored data ---------------------------------------------------------------------------

    def query(self, sql: str) -> list[tuple[Any, ...]]:
        with contextlib.closing(
            sqlite3.connect(f"file:{self.state / 'federation.db'}?mode=ro", uri=True)
        ) as database:
            return database.execute(sql).fetchall()

    def change(self, sql: str) -> None:
        """Change the database while no server runs, as this version never would."""
        with (
            contextlib.closing(sqlite3.connect(self.state / "federation.db")) as database,
            database,
        ):
            assert database.execute(sql).rowcount > 0

    def model(self, version: int) -> Model:
        (file,) = self.query(f"select file from models where version = {version}")[0]
        return Model.load(self.state / file)[0]

    def records(self) -> list[dict[str, Any]]:
        return [
            json.loads(text) for (text,) in self.query("select record from rounds order by round")
        ]

    def selections(self) -> list[set[str]]:
        """Return by round the clients that were selected at its first attempt."""
        asked: dict[int, set[str]] = {}
        for number, text in self.query("select round, event from journal order by sequence"):
            event = json.loads(text)
            if event["event"] == "ClientsChosen" and event["wanted"]:
                asked.setdefault(number, set(event["clients"]))
        return [asked[number] for number in sorted(asked)]

    def prove(self, rounds: int) -> None:
        """Check that every round was committed once, and that the model is their updates' sum."""
        records = self.records()
        assert [record["round"] for record in records] == list(range(rounds))
        stored = {
            (number, client) for number, client in self.query("select round, client from updates")
        }
        expected, counter, buffer = np.float64(0), 0, 0.0
        for record in records:
            contributions = {c["client"]: c["weight"] for c in record["contributions"]}
            assert len(contributions) == len(record["contributions"])
            assert {(record["round"], client) for client in contributions} <= stored
            assert abs(sum(contributions.values()) - 1) < 1e-12
            expected += sum(
                weight * self.options[client]["shift"] for client, weight in contributions.items()
            )
            increments = sorted(self.options[client]["samples"] for client in contributions)
            counter += increments[(len(increments) - 1) // 2]  # the median
            buffer = self._next_buffer(buffer, record, contributions)
        counted = {
            (record["round"], c["client"]) for record in records for c in record["contributions"]
        }
        assert {(number, client) for number, client in stored if number < rounds} == counted
        model = self.model(rounds)
        np.testing.assert_allclose(model.parameters, -expected, rtol=1e-5)
        assert model.counters[0] == counter
        np.testing.assert_allclose(model.buffers, buffer, rtol=1e-5)
        digest = self.query(f"select digest from models where version = {rounds}")[0][0]
        assert digest == records[-1]["digest"]

    def _next_buffer(
        self, current: float, record: dict[str, Any], contributions: dict[str, float]
    ) -> float:
        """Return the weighted mean of the clients' values, with changes clipped as recorded."""
        findings = record.get("admission", ())
        clipped = {
            finding["client"]: finding for finding in findings if finding["check"] == "buffers"
        }
        total = 0.0
        for client, weight in contributions.items():
            change = self.options[client]["shift"] - current
            if client in clipped:
                change *= clipped[client]["limit"] / clipped[client]["value"]
            total += weight * (current + change)
        return total


def _started_with(
    program: list[str], installation: Installation | None
) -> tuple[list[str], Path, dict[str, str]]:
    """Return the command, the folder and the environment of a process."""
    if installation is None:
        return program, HERE, {}
    return installation.program, installation.folder, installation.environment


def task_spec(task: str) -> str:
    """Return a task of tests/support/tasks.py by its name, or one of another module as it is."""
    return task if ":" in task else f"tasks:{task}"
