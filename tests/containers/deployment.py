"""The federation of docker-compose.yml, run for real under a name and on ports of the test's own."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc

from fairfleet.proto.v1 import operator_pb2 as pb
from fairfleet.proto.v1.operator_pb2_grpc import OperatorStub
from tests.containers.engine import Engine
from tests.e2e.fleet import OWN_CONNECTION, free_port
from tests.e2e.scraping import Series, scrape

SERVICES = ("server", "client")  # and what they depend on: Prometheus' image cannot be had everywhere


class Deployment:
    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.port, self.http_port = free_port(), free_port()
        self.project = f"fairfleet-test-{os.getpid()}"
        self._variables = {
            "COMPOSE_PROJECT_NAME": self.project,
            "FAIRFLEET_PORT": str(self.port),
            "FAIRFLEET_HTTP_PORT": str(self.http_port),
            "FAIRFLEET_ROUNDS": "1000000",
        }

    def compose(self, *words: str, seconds: float = 180) -> str:
        return self.engine.run("compose", *words, seconds=seconds, **self._variables)

    def up(self, clients: int) -> None:
        how = ("--detach", "--wait", "--no-build", "--no-recreate", "--scale", f"client={clients}")
        self.compose("up", *how, *SERVICES)

    # ---- containers ----------------------------------------------------------------------------

    def containers(self, service: str) -> list[str]:
        """The ids of a service's containers that run."""
        return self.compose("ps", "--quiet", service).split()

    def client(self, name: str) -> str:
        """The container that is this client now: it says so in its log when it starts."""
        (found,) = [id for id in self.containers("client") if self.name_of(id) == name]
        return found

    def name_of(self, container: str) -> str:
        said = self.engine.attempt("logs", container)
        return re.findall(r"this is replica \d+: (\S+)", said.stdout + said.stderr)[-1]

    def exit_code(self, container: str) -> int:
        code: int = self.engine.inspect(container)["State"]["ExitCode"]
        return code

    @contextmanager
    def cut_off(self, container: str) -> Iterator[None]:
        """Without a network, as behind a link that is down."""
        network = f"{self.project}_default"
        self.engine.run("network", "disconnect", network, container)
        try:
            yield
        finally:
            self.engine.run("network", "connect", network, container)

    # ---- what it says, through the published ports ---------------------------------------------

    def status(self) -> pb.StatusResponse:
        with self._channel() as channel:
            return OperatorStub(channel).Status(pb.StatusRequest(), timeout=10, wait_for_ready=True)

    def version(self) -> int:
        return int(self.status().version)

    def clients(self) -> dict[str, pb.ClientRecord]:
        with self._channel() as channel:
            found = OperatorStub(channel).Clients(pb.ClientsRequest(), timeout=10, wait_for_ready=True)
            return {record.client: record for record in found}

    def rounds(self, first: int = 0) -> list[pb.RoundRecord]:
        with self._channel() as channel:
            return list(OperatorStub(channel).Rounds(pb.RoundsRequest(first=first), timeout=30, wait_for_ready=True))

    def metrics(self) -> dict[Series, float]:
        return scrape(self.http_port)

    def _channel(self) -> grpc.Channel:
        return grpc.insecure_channel(f"127.0.0.1:{self.port}", OWN_CONNECTION)


def took_part(record: pb.RoundRecord) -> set[str]:
    return {contribution.client for contribution in record.contributions}


def stood_in(record: pb.RoundRecord) -> set[str]:
    """Absent clients whose history row the rule took account of."""
    diagnostics: dict[str, Any] = json.loads(record.diagnostics_json)
    return set(diagnostics["history_coefficients"])


@contextmanager
def deployed(engine: Engine, clients: int) -> Iterator[Deployment]:
    deployment = Deployment(engine)
    try:
        deployment.up(clients)
        yield deployment
    finally:
        told = engine.attempt("compose", "--project-name", deployment.project, "logs", "--no-color", "--tail", "50")
        print(told.stdout)  # pytest shows it when the test fails
        deployment.compose("down", "--volumes", "--remove-orphans", "--timeout", "5")
