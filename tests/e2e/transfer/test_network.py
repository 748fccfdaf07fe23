"""Real bad links: delay, loss, a slow uplink, partitions, and a peer that does not read."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fairfleet.proto.v1 import fleet_pb2 as pb
from tests.support.device import Device
from tests.support.fleet import Fleet, until
from tests.support.network import Network, SpreadFleet, skip_unless_available

pytestmark = pytest.mark.slow
MIB = 1 << 20


@pytest.fixture
def spread(tmp_path: Path) -> Iterator[SpreadFleet]:
    skip_unless_available()
    fleet = SpreadFleet(tmp_path)
    with Network().running() as fleet.network:
        try:
            yield fleet
        finally:
            fleet.end()


def test_a_far_client_on_a_slow_and_lossy_link_takes_part_in_every_round(
    spread: SpreadFleet,
) -> None:
    spread.init(15_000)  # 60 kB: half a second over its uplink
    spread.start_server(rounds=4, round__minimum_clients=3, lease_seconds=20, codec="raw32")
    for name in ("a", "b", "far"):
        spread.start_client(name)
    with spread.network.fault(
        "ff-far", "shape", "--rtt-ms", "100", "--loss", "2", "--rate", "1mbit"
    ):
        spread.wait_for_version(4, 120)
    spread.prove(4)
    assert all(len(record["contributions"]) == 3 for record in spread.records())


def test_a_partition_costs_a_client_only_the_rounds_while_it_lasts(spread: SpreadFleet) -> None:
    spread.init()
    spread.start_server(
        rounds=10_000,
        round__minimum_clients=2,
        round__quorum=0.6,
        round__deadline_seconds=4,
        lease_seconds=6,
    )
    for name in ("a", "b", "far"):
        spread.start_client(name, step_seconds=0.2)

    def contributes() -> bool:
        return "far" in {c["client"] for c in spread.records()[-1]["contributions"]}

    until(lambda: spread.version() > 1 and contributes(), "the client to take part")
    with spread.network.fault("ff-far", "partition"):
        before = spread.version()
        time.sleep(20)
        during = spread.version()
        assert during > before, "the others continued"
    until(contributes, "the client to come back", 60)
    spread.kill_server()
    spread.prove(spread.version())


def test_a_link_that_breaks_in_mid_upload_costs_only_the_bytes_in_flight(
    spread: SpreadFleet,
) -> None:
    size = 2_000_000
    spread.init(size)
    spread.start_server(rounds=1, round__minimum_clients=1, lease_seconds=60, codec="raw32")
    spread.start_client("far")
    with spread.network.fault("ff-far", "shape", "--rtt-ms", "20", "--rate", "16mbit"):
        until(lambda: spread.status_json()["bytes_received"] > 2 * MIB, "a part of the upload", 60)
        with spread.network.fault("ff-far", "partition"):
            received = spread.status_json()["bytes_received"]
            assert received < 4 * size
            time.sleep(45)  # longer than keepalive needs to close the connection
        until(lambda: spread.version() == 1, "the rest of the upload", 120)
    (total,) = spread.query("select size_bytes from updates")[0]
    assert spread.status_json()["bytes_received"] - total < 3 * MIB
    spread.prove(1)


def test_a_peer_that_does_not_read_delays_no_other_client(fleet: Fleet) -> None:
    fleet.init(5_000_000)
    fleet.start_server(
        rounds=10_000,
        round__minimum_clients=3,
        round__quorum=0.6,
        round__deadline_seconds=10,
        lease_seconds=60,
    )
    for name in ("a", "b"):
        fleet.start_client(name)
    lazy = Device(fleet.address, "lazy")
    lazy.join()
    task = lazy.train_task()
    stream = lazy.stub.FetchModel(
        pb.FetchModelRequest(session=lazy.session, version=task.model.version)
    )
    next(iter(stream))  # and never more: the sent bytes stay in the buffers
    fleet.wait_for_version(task.round + 3, 120)
    stream.cancel()
    fleet.kill_server()
    fleet.prove(fleet.version())


def test_a_client_that_is_suspended_like_a_laptop_reconnects(fleet: Fleet) -> None:
    fleet.init()
    fleet.start_server(
        rounds=10_000,
        round__minimum_clients=2,
        round__quorum=0.6,
        round__deadline_seconds=3,
        lease_seconds=4,
    )
    for name in ("a", "b", "laptop"):
        fleet.start_client(name, step_seconds=0.1)
    fleet.wait_for_version(1)
    fleet.clients["laptop"].send_signal(signal.SIGSTOP)
    before = fleet.version()
    time.sleep(8)
    assert fleet.version() > before
    fleet.clients["laptop"].send_signal(signal.SIGCONT)
    until(
        lambda: "laptop" in {c["client"] for c in fleet.records()[-1]["contributions"]},
        "its return",
        60,
    )
