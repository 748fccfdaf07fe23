"""A server whose federation is another one at every join."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest

from fairfleet.client.agent.agent import Agent
from fairfleet.common import wire
from fairfleet.common.net.server_access import ServerAccess
from fairfleet.proto.v1 import fleet_pb2 as pb
from fairfleet.proto.v1.fleet_pb2_grpc import FleetServicer, add_FleetServicer_to_server
from tests.support.tasks import quadratic

JOINS = 160


class Fickle(FleetServicer):
    """Forgets every session at once, and has a new federation at each join."""

    def __init__(self) -> None:
        self.joins = 0
        self.agent: Agent | None = None

    def Join(self, request: pb.JoinRequest, context: Any) -> pb.JoinResponse:  # noqa: N802
        self.joins += 1
        if self.joins == JOINS and self.agent is not None:
            self.agent.stop()
        return pb.JoinResponse(
            session=uuid.uuid4().hex,
            heartbeat_seconds=5,
            federation="birds",
            federation_id=str(uuid.uuid4()),
            signature=wire.signature_out(quadratic(size="3").initial_model().signature),
        )

    def NextTask(self, request: pb.NextTaskRequest, context: Any) -> pb.NextTaskResponse:  # noqa: N802
        context.abort(grpc.StatusCode.UNAUTHENTICATED, "this session is not known here")
        raise AssertionError("abort raises")


@pytest.fixture
def fickle() -> Iterator[tuple[Fickle, str]]:
    service, server = Fickle(), grpc.server(ThreadPoolExecutor(2))
    add_FleetServicer_to_server(service, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield service, f"127.0.0.1:{port}"
    server.stop(None).wait()


def test_a_server_that_changes_all_the_time_cannot_fill_the_disk_with_folders_quickly(
    fickle: tuple[Fickle, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    service, address = fickle
    agent = service.agent = Agent("ann", quadratic(size="3"), ServerAccess(address), tmp_path)
    waited = list[float]()
    monkeypatch.setattr(agent._connection, "wait", waited.append)
    agent.run()
    assert service.joins >= JOINS
    assert max(waited[-40:]) > 5  # up to a minute by now; no folder is made meanwhile
