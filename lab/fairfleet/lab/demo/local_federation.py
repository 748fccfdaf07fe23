"""A complete federation on this machine: a real server and real clients.

It is watched until it is finished. If a process ends early, the others are stopped.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from fairfleet.client.operator.connection import OperatorConnection
from fairfleet.client.operator.display import Display, follow
from fairfleet.client.operator.fleet_view import FleetView, Observation, VersionFairness
from fairfleet.client.operator.model_download import save_model
from fairfleet.common.errors import FleetError
from fairfleet.common.fairness import Fairness
from fairfleet.common.net.server_access import ServerAccess
from fairfleet.lab.demo.processes import ProcessGroup
from fairfleet.proto.v1 import operator_pb2 as pb

START_SECONDS = 60.0
END_SECONDS = 15.0


@dataclass(frozen=True)
class LocalFederation:
    """What to run: a server with its settings, and clients with the options of their task."""

    name: str
    rule: str  # for people; the server reads the rule from its settings
    folder: Path  # for state and logs
    initial: Path  # the untrained model
    output: Path  # the trained one
    rounds: int
    task: str
    clients: Mapping[str, Mapping[str, str]]  # by name: the options of its task
    settings: Mapping[str, str] = field(default_factory=dict)  # further settings of the server


@dataclass(frozen=True)
class Result:
    """What one federation achieved, and what it cost."""

    name: str
    rule: str
    rounds: int
    parameters: int
    accuracy: Mapping[str, float]  # of each client, on its own test data, at the end
    evaluations: tuple[VersionFairness, ...]
    seconds: float  # from the first process to the last
    bytes_sent: int
    bytes_received: int
    output: Path
    logs: Path

    @cached_property
    def fairness(self) -> Fairness:
        """The measures of fairness over all clients."""
        return Fairness.of(list(self.accuracy.values()))


def run_federation(federation: LocalFederation, display: Display) -> Result:
    """Run a federation to its end and save the trained model.

    Raises FleetError if a process ends early or a client does not evaluate the model.
    """
    began = time.monotonic()
    logs = federation.folder / "logs"
    with ProcessGroup(logs) as processes:
        processes.start("server", *_server_arguments(federation))
        address = processes.wait_for_line("server", "serving on ", START_SECONDS)
        for name in federation.clients:
            processes.start(name, *_client_arguments(federation, name, address))
        with OperatorConnection(ServerAccess(address)) as connection:
            view = follow(_checked(processes, connection), display)
            for name in federation.clients:
                processes.finish(name, END_SECONDS)
            save_model(connection.model(None), federation.output)
    return _result(federation, view, time.monotonic() - began, logs)


def _checked(processes: ProcessGroup, connection: OperatorConnection) -> Iterator[Observation]:
    """Yield observations; raise if a process ends early.

    A client ends by itself only after the federation is finished. The server never does.
    """
    for observation in connection.observe():
        yield observation
        ended = processes.ended()
        if ended and ("server" in ended or connection.status().phase != pb.PHASE_FINISHED):
            raise processes.unexpected(ended[0])


def _server_arguments(federation: LocalFederation) -> Iterator[str]:
    yield from (
        "server",
        "--listen",
        "127.0.0.1:0",
        "--state-dir",
        str(federation.folder / "state"),
    )
    yield from ("--model", str(federation.initial), "--rounds", str(federation.rounds))
    yield from ("--minimum-clients", str(len(federation.clients)))
    for path, value in {"name": federation.name, **federation.settings}.items():
        yield from ("--set", f"{path}={value}")


def _client_arguments(federation: LocalFederation, name: str, address: str) -> Iterator[str]:
    yield from ("client", "--server", address, "--name", name, "--task", federation.task)
    yield from ("--state-dir", str(federation.folder / "clients"))
    for option, value in federation.clients[name].items():
        yield from ("--option", f"{option}={value}")


def _result(federation: LocalFederation, view: FleetView, seconds: float, logs: Path) -> Result:
    accuracy = {c.name: c.accuracy for c in view.by_need() if c.accuracy is not None}
    if missing := federation.clients.keys() - accuracy.keys():
        raise FleetError(
            f"{', '.join(sorted(missing))} did not evaluate the trained model; "
            f"see the logs in {logs}"
        )
    return Result(
        name=federation.name,
        rule=federation.rule,
        rounds=view.status.version,
        parameters=view.status.parameters,
        accuracy=accuracy,
        evaluations=view.evaluations,
        seconds=seconds,
        bytes_sent=view.status.bytes_sent,
        bytes_received=view.status.bytes_received,
        output=federation.output,
        logs=logs,
    )
