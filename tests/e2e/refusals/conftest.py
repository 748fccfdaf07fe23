"""One server for all tests of a module: it must survive all of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fairfleet.proto.v1 import fleet_pb2 as pb
from tests.support.device import Device
from tests.support.fleet import Fleet


@pytest.fixture(scope="module")
def shared_fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Start one server for all tests of a module; it must be alive at the end."""
    fleet = Fleet(tmp_path_factory.mktemp("fleet"))
    fleet.init(600_000)
    fleet.start_server(
        rounds=10_000,
        round__minimum_clients=2,
        round__quorum=0.1,
        lease_seconds=60,
        limits__joins_at_once=1000,
    )
    yield fleet
    assert fleet.server is not None
    assert fleet.server.poll() is None, fleet.log("server.log")
    assert "Traceback" not in fleet.log("server.log")
    fleet.end()


@pytest.fixture
def device(shared_fleet: Fleet) -> Iterator[Device]:
    """A client with a training task.

    An honest client trains at the same time. Its update must count, whatever this one does.
    """
    honest, device = Device(shared_fleet.address, "honest"), Device(shared_fleet.address, "device")
    honest.join()
    device.join()
    device.train_task()
    honest.train_task()
    assert device.task.round == honest.task.round
    yield device
    chunks, encoded = honest.encode()
    receipt = honest.send(honest.open(encoded).upload, chunks)
    assert (receipt.outcome, receipt.durable) == (pb.OUTCOME_COUNTED, True)
    device.leave()
    shared_fleet.wait_for_version(honest.task.round + 1)
    honest.leave()
