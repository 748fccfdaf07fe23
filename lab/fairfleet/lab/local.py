"""A whole federation on this machine: a real server, real clients, watched until it is finished."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from fairfleet.client.display import Display, follow
from fairfleet.client.exporting import save_model
from fairfleet.client.fleet_view import Observation, Served, View
from fairfleet.client.operator_link import OperatorLink
from fairfleet.common.access import Access
from fairfleet.common.errors import FleetError
from fairfleet.common.fairness import Fairness
from fairfleet.lab.processes import Crew
from fairfleet.proto.v1 import operator_pb2 as pb

START_SECONDS = 60.0
END_SECONDS = 15.0


@dataclass(frozen=True)
class LocalFederation:
    name: str
    rule: str  # in words; what the server is told is among the settings
    folder: Path  # for state and logs
    initial: Path  # the untrained model
    output: Path  # the trained one
    rounds: int
    task: str
    clients: Mapping[str, Mapping[str, str]]  # by name: the options of its task
    settings: Mapping[str, str] = field(default_factory=dict)  # of the server, beside those above


@dataclass(frozen=True)
class Result:
    name: str
    rule: str
    rounds: int
    parameters: int
    accuracy: Mapping[str, float]  # of each client, on its own test data, at the end
    evaluations: tuple[Served, ...]
    seconds: float  # from the first process to the last
    bytes_sent: int
    bytes_received: int
    output: Path
    logs: Path

    @cached_property
    def fairness(self) -> Fairness:
        return Fairness.of(list(self.accuracy.values()))


def run_federation(federation: LocalFederation, display: Display) -> Result:
    began = time.monotonic()
    logs = federation.folder / "logs"
    with Crew(logs) as crew:
        crew.start("server", *_server(federation))
        address = crew.said("server", "serving on ", START_SECONDS)
        for name in federation.clients:
            crew.start(name, *_client(federation, name, address))
        with OperatorLink(Access(address)) as link:
            view = follow(_checked(crew, link), display)
            for name in federation.clients:
                crew.finish(name, END_SECONDS)
            save_model(link.model(None), federation.output)
    return _result(federation, view, time.monotonic() - began, logs)


def _checked(crew: Crew, link: OperatorLink) -> Iterator[Observation]:
    """What is observed, as long as nobody ends before its time: a client goes home only from a finished federation."""
    for seen in link.observe():
        yield seen
        ended = crew.ended()
        if ended and ("server" in ended or link.status().phase != pb.PHASE_FINISHED):
            raise crew.unexpected(ended[0])


def _server(federation: LocalFederation) -> Iterator[str]:
    yield from ("server", "--listen", "127.0.0.1:0", "--state-dir", str(federation.folder / "state"))
    yield from ("--model", str(federation.initial), "--rounds", str(federation.rounds))
    yield from ("--minimum-clients", str(len(federation.clients)))
    for path, value in {"name": federation.name, **federation.settings}.items():
        yield from ("--set", f"{path}={value}")


def _client(federation: LocalFederation, name: str, address: str) -> Iterator[str]:
    yield from ("client", "--server", address, "--name", name, "--task", federation.task)
    yield from ("--state-dir", str(federation.folder / "clients"))
    for option, value in federation.clients[name].items():
        yield from ("--option", f"{option}={value}")


def _result(federation: LocalFederation, view: View, seconds: float, logs: Path) -> Result:
    accuracy = {c.name: c.accuracy for c in view.by_need() if c.accuracy is not None}
    if missing := federation.clients.keys() - accuracy.keys():
        raise FleetError(f"{', '.join(sorted(missing))} did not evaluate the trained model; see the logs in {logs}")
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
