"""The federation of docker-compose.yml, run with a project name and ports of the test."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc

from fairfleet.common.net.server_access import ServerAccess
from fairfleet.proto.v1 import operator_pb2 as pb
from fairfleet.proto.v1.operator_pb2_grpc import OperatorStub
from tests.containers.engine import Engine
from tests.containers.images import VERSION
from tests.support.fleet import OWN_CONNECTION, PATIENCE_SECONDS, free_port, until
from tests.support.scraping import PrometheusApi, Series, scrape

# The graphics card of `gpu-client` is left out, as test machines have none.
WITHOUT_CARD = "services: {gpu-client: {deploy: {resources: {reservations: !reset null}}}}\n"
HARDENED = (
    "--read-only",
    "--tmpfs",
    "/tmp",
    "--cap-drop",
    "ALL",
    "--security-opt",
    "no-new-privileges",
)


class Deployment:
    def __init__(self, engine: Engine, folder: Path) -> None:
        self.engine = engine
        self.port, self.http_port, self.prometheus_port = free_port(), free_port(), free_port()
        self.insecure_port = free_port()
        self.project = f"fairfleet-test-{os.getpid()}"
        self.operator = folder / "operator.fleet"
        override = folder / "override.yml"
        override.write_text(WITHOUT_CARD)
        self._variables = {
            "COMPOSE_PROJECT_NAME": self.project,
            "COMPOSE_FILE": f"docker-compose.yml:{override}",
            "FAIRFLEET_VERSION": VERSION,
            "FAIRFLEET_PORT": str(self.port),
            "FAIRFLEET_HTTP_PORT": str(self.http_port),
            "FAIRFLEET_INSECURE_PORT": str(self.insecure_port),
            "FAIRFLEET_INSECURE_HTTP_PORT": str(free_port()),
            "PROMETHEUS_PORT": str(self.prometheus_port),
            "FAIRFLEET_ROUNDS": "1000000",
            "FAIRFLEET_DEVICE": "cpu",
        }

    def compose(self, *words: str, seconds: float = 180) -> str:
        return self.engine.run("compose", *words, seconds=seconds, **self._variables)

    def up(self, *services: str) -> None:
        """Start these services and their dependencies; Grafana's image is not always available."""
        scale = ("--scale", "client=3") if "client" in services else ()
        self.compose("up", "--detach", "--wait", "--no-build", "--no-recreate", *scale, *services)

    def fetch_operator(self) -> None:
        self.compose("cp", "server:/pki/operator/operator.fleet", str(self.operator))

    # ---- containers ----------------------------------------------------------------------------

    def containers(self, service: str) -> list[str]:
        """Return the ids of the running containers of a service."""
        return self.compose("ps", "--quiet", service).split()

    def client(self, name: str) -> str:
        """Return the container of this client, according to the logs."""
        (container,) = [
            session_id
            for session_id in self.containers("client")
            if self.name_of(session_id) == name
        ]
        return container

    def name_of(self, container: str) -> str:
        said = self.engine.attempt("logs", container)
        return re.findall(r"this is replica \d+: (\S+)", said.stdout + said.stderr)[-1]

    def exit_code(self, container: str) -> int:
        code: int = self.engine.inspect(container)["State"]["ExitCode"]
        return code

    @contextmanager
    def cut_off(self, container: str) -> Iterator[None]:
        """Disconnect a container from its network while the block runs."""
        network = f"{self.project}_default"
        self.engine.run("network", "disconnect", network, container)
        try:
            yield
        finally:
            self.engine.run("network", "connect", network, container)

    @contextmanager
    def another_client(self, image: str, *options: str) -> Iterator[str]:
        """Run a container of another image with the configuration of the service `client`."""
        like = self.engine.inspect(self.containers("client")[0])
        words = [
            "--network",
            f"{self.project}_default",
            "--volumes-from",
            like["Id"],
            *HARDENED,
            *options,
        ]
        words += [word for variable in like["Config"]["Env"] for word in ("--env", variable)]
        container = self.engine.run("run", "--detach", *words, image)
        try:
            yield container
        finally:
            print(self.engine.attempt("logs", container).stderr)
            self.engine.run("rm", "--force", container)

    @contextmanager
    def device(self, *words: str) -> Iterator[None]:
        """Run a client process outside all containers; it is stopped at the end."""
        with subprocess.Popen([sys.executable, "-m", "fairfleet.common.cli", *words]) as process:
            try:
                yield
            finally:
                process.terminate()
                assert process.wait(30) == 0

    # ---- status through the published ports ----------------------------------------------------

    def status(self) -> pb.StatusResponse:
        with self.channel() as channel:
            return OperatorStub(channel).Status(pb.StatusRequest(), timeout=10, wait_for_ready=True)

    def version(self) -> int:
        return int(self.status().version)

    def clients(self) -> dict[str, pb.ClientRecord]:
        with self.channel() as channel:
            response = OperatorStub(channel).Clients(
                pb.ClientsRequest(), timeout=10, wait_for_ready=True
            )
            return {record.client: record for record in response}

    def rounds(self, first: int = 0) -> list[pb.RoundRecord]:
        with self.channel() as channel:
            return list(
                OperatorStub(channel).Rounds(
                    pb.RoundsRequest(first=first), timeout=30, wait_for_ready=True
                )
            )

    def wait_for_a_round_with(self, clients: set[str], seconds: float = PATIENCE_SECONDS) -> None:
        until(
            lambda: took_part(self.rounds(self.version() - 1)[-1]) == clients,
            f"a round with {sorted(clients)}",
            seconds,
        )

    def metrics(self) -> dict[Series, float]:
        return scrape(self.http_port)

    def prometheus(self) -> PrometheusApi:
        return PrometheusApi(f"http://127.0.0.1:{self.prometheus_port}")

    def channel(self) -> grpc.Channel:
        return ServerAccess(None, self.operator).channel(OWN_CONNECTION)


def took_part(record: pb.RoundRecord) -> set[str]:
    return {contribution.client for contribution in record.contributions}


def stood_in(record: pb.RoundRecord) -> set[str]:
    """Return the absent clients whose history rows the rule used."""
    diagnostics: dict[str, Any] = json.loads(record.diagnostics_json)
    return set(diagnostics["history_coefficients"])


@contextmanager
def deployed(engine: Engine, folder: Path) -> Iterator[Deployment]:
    """Yield the running federation with three clients and a Prometheus."""
    deployment = Deployment(engine, folder)
    everything = ("--profile", "gpu", "--profile", "insecure-demo")
    try:
        deployment.up("server", "client", "prometheus")
        deployment.fetch_operator()
        yield deployment
    finally:
        output = engine.attempt(
            "compose", "--project-name", deployment.project, "logs", "--no-color", "--tail", "50"
        )
        print(output.stdout)  # pytest shows it when the test fails
        deployment.compose(*everything, "down", "--volumes", "--remove-orphans", "--timeout", "5")
