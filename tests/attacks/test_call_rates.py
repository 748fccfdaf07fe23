"""Clients that join, poll or call too often, and honest clients, which are not slowed down."""

from __future__ import annotations

import time
from contextlib import closing
from pathlib import Path
from typing import Any

import grpc
import pytest

from fairfleet.client.agent.server_connection import ServerConnection
from fairfleet.common.net.server_access import ServerAccess
from fairfleet.common.wire import RETRY_METADATA
from fairfleet.proto.v1 import fleet_pb2 as pb
from tests.support.attacks.siege import Siege, calls_until_refused
from tests.support.device import Device
from tests.support.fleet import Fleet, until

Code = grpc.StatusCode


def told_when(error: Any) -> float:
    return float(
        next(entry.value for entry in error.trailing_metadata() if entry.key == RETRY_METADATA)
    )


def test_repeated_joins_are_limited(siege: Siege) -> None:
    device = Device(siege.address, "restless")
    with siege.borne():
        count, error = calls_until_refused(lambda: device.join(instance="the same"), 100)
        assert 30 <= count < 40
        assert error.code() is Code.RESOURCE_EXHAUSTED
        assert "joined more than 30 times a minute" in error.details()
        assert 0 < told_when(error) <= 2
        assert siege.refused("joins") >= 1
    Device(siege.address, "another").join()  # the limit is the client's own


def test_a_burst_of_joins_is_refused_with_a_retry_time(tmp_path: Path) -> None:
    """The limits are the default ones."""
    fleet = Fleet(tmp_path)
    try:
        fleet.init()
        fleet.start_server()
        device, began = Device(fleet.address, "restless"), time.monotonic()
        count, error = calls_until_refused(lambda: device.join(instance="the same"), 60)
        assert 10 <= count <= 11 + 2 * (time.monotonic() - began)
        assert error.code() is Code.RESOURCE_EXHAUSTED
        assert "joined more than 120 times a minute, or 10 times at once" in error.details()
        assert 0 < told_when(error) <= 0.5
        Device(fleet.address, "another").join()  # the limit is the client's own
        join = pb.JoinRequest(
            client="restless", instance="the same", protocol_version=1, codecs=["raw32"]
        )
        link = ServerConnection(ServerAccess(fleet.address), join)
        assert link.enter().federation  # the real client waits as requested and is accepted
        link.leave("enough")
    finally:
        fleet.end()


@pytest.mark.slow
def test_repeated_polls_are_limited(siege: Siege, device: Device) -> None:
    """Every poll brings the same task."""
    with siege.borne():
        count, error = calls_until_refused(device.next_task, 200)
        assert 20 <= count < 100  # a poll that brings the task of a new round is free
        assert error.code() is Code.RESOURCE_EXHAUSTED
        assert "polled without a new task more than 30 times a minute" in error.details()
        assert 0 < told_when(error) <= 2
        assert siege.refused("polls") >= 1


@pytest.mark.slow
def test_repeated_calls_are_limited(siege: Siege, device: Device) -> None:
    heartbeat = pb.HeartbeatRequest(session=device.session, task=device.task.id)
    with siege.borne():
        count, error = calls_until_refused(lambda: device.stub.Heartbeat(heartbeat), 2000)
        assert 500 <= count < 1500
        assert error.code() is Code.RESOURCE_EXHAUSTED
        assert siege.refused("calls") >= 1


@pytest.mark.slow
def test_the_real_client_backs_off_when_refused(siege: Siege) -> None:
    """With more polls than allowed, the client waits as long as the server says; none fails."""
    join = pb.JoinRequest(client="eager", instance="x", protocol_version=1, codecs=["raw32"])
    link = ServerConnection(ServerAccess(siege.address), join)
    for _ in range(32):
        assert link.next_task().WhichOneof("task") in ("train", "wait")
    assert siege.refused("polls") >= 1
    link.leave("enough")


@pytest.mark.slow
def test_a_fast_federation_is_not_delayed(tmp_path: Path) -> None:
    """Forty rounds take seconds, and three polls without a task are allowed per minute.

    Every poll of these clients brings a new task.
    """
    fleet = Fleet(tmp_path)
    try:
        fleet.init()
        fleet.start_server(rounds=40, exit_when_finished=True, limits__polls_per_minute=3)
        for name in ("ann", "bob"):
            fleet.start_client(name)
        assert set(fleet.wait_clients().values()) == {0}
        for name in ("ann", "bob"):
            assert "joined" in fleet.log(f"{name}.log")
            assert "requests a pause" not in fleet.log(f"{name}.log")
        fleet.prove(40)
    finally:
        fleet.end()


@pytest.mark.slow
def test_the_number_of_client_names_is_limited(siege: Siege) -> None:
    """Each name leaves data behind, so their number is limited; known names may return.

    This test uses all names up.
    """
    with siege.borne():

        def join_and_leave() -> None:
            nonlocal number
            number += 1
            guest = Device(siege.address, f"name-{number}")
            with closing(guest.channel):
                guest.join()
                guest.stub.Leave(pb.LeaveRequest(session=guest.session))

        number = 0
        count, error = calls_until_refused(join_and_leave, 1000)
        assert count < 400
        assert error.code() is Code.RESOURCE_EXHAUSTED
        assert "are known" in error.details()
        back = Device(siege.address, "name-1")
        back.join()
        back.leave()


@pytest.mark.slow
def test_the_server_forgets_refused_clients(siege: Siege) -> None:
    """Clients of this module that misbehaved are gone when their leases end."""
    until(lambda: siege.fleet.status().connected <= 2, "leases to end")
