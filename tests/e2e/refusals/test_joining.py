"""What clients that cannot join are answered, and who may use a name and a session."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import grpc
import pytest

from fairfleet.common.wire import ERROR_METADATA, signature_out
from fairfleet.proto.v1 import fleet_pb2 as pb
from fairfleet.proto.v1.model_pb2 import SECTION_BUFFERS, Signature
from tests.support.device import Device
from tests.support.fleet import Fleet, until
from tests.support.refusals import refused

Code = grpc.StatusCode


def test_an_unknown_protocol_version_is_refused(shared_fleet: Fleet) -> None:
    with refused(Code.FAILED_PRECONDITION, "speaks protocol version 99", "speaks 1", "Upgrade"):
        Device(shared_fleet.address, "future").join(protocol_version=99)


def test_every_error_of_the_server_names_its_class(shared_fleet: Fleet) -> None:
    """Errors without the name come from a broken connection, after which a client joins again."""
    with pytest.raises(grpc.RpcError) as caught:
        Device(shared_fleet.address, "stranger").next_task()
    error: Any = caught.value
    assert (ERROR_METADATA, "SessionUnknown") in [
        (key, value) for key, value in error.trailing_metadata()
    ]


@pytest.mark.parametrize("name", ["", "a/b", "../up", "..", "x" * 65, "white space", "new\nline"])
def test_an_invalid_client_name_is_refused(shared_fleet: Fleet, name: str) -> None:
    with refused(Code.INVALID_ARGUMENT, "1 to 64"):
        Device(shared_fleet.address, name).join()


def test_a_client_without_a_common_codec_is_refused(shared_fleet: Fleet) -> None:
    with refused(Code.FAILED_PRECONDITION, "no codec in common", "smoke-signals", "raw32"):
        Device(shared_fleet.address, "odd").join(codecs=["smoke-signals"])


def rename_tensor(signature: Signature) -> None:
    """Give the first tensor another name."""
    signature.tensors[0].name = "wait"


def change_shape(signature: Signature) -> None:
    """Give the second tensor another shape."""
    signature.tensors[1].shape[0] = 4


def change_dtype(signature: Signature) -> None:
    """Give the second tensor another type."""
    signature.tensors[1].dtype = "float64"


def add_tensor(signature: Signature) -> None:
    """Add a tensor that the federation does not have."""
    signature.tensors.add(name="more", dtype="float32", section=SECTION_BUFFERS)


def remove_section(signature: Signature) -> None:
    """Leave the section of the first tensor unset."""
    signature.tensors[0].section = 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (rename_tensor, "tensor weight float32[600000] (parameters) is missing"),
        (change_shape, "found tensor bias float32[4] (parameters), expected bias float32[3]"),
        (change_dtype, "found tensor bias float64[3]"),
        (add_tensor, "found unexpected tensor more"),
        (remove_section, "section"),
    ],
)
def test_a_client_with_another_model_is_refused(
    shared_fleet: Fleet, change: Callable[[Signature], None], message: str
) -> None:
    probe = Device(shared_fleet.address, "probe")
    probe.join()
    signature = signature_out(probe.model.signature)
    change(signature)
    with refused(Code.INVALID_ARGUMENT, message):
        probe.join(signature=signature)
    probe.leave()


def test_a_real_client_with_another_model_reports_the_difference_and_exits(
    shared_fleet: Fleet,
) -> None:
    done = shared_fleet.run(
        "client",
        "--task",
        "tasks:shift",
        "-o",
        "size=7",
        "--server",
        shared_fleet.address,
        "--name",
        "x",
    )
    assert done.returncode == 4
    assert "found tensor weight float32[7]" in done.stderr
    assert "Traceback" not in done.stderr


def test_an_unknown_session_is_refused(shared_fleet: Fleet) -> None:
    stranger = Device(shared_fleet.address, "stranger")
    with refused(Code.UNAUTHENTICATED, "join again"):
        stranger.next_task()
    with refused(Code.UNAUTHENTICATED, "join again"):
        list(stranger.stub.FetchModel(pb.FetchModelRequest(version=0)))


def test_a_second_join_takes_over_and_the_first_process_is_refused(shared_fleet: Fleet) -> None:
    first, second = Device(shared_fleet.address, "twice"), Device(shared_fleet.address, "twice")
    older = first.join()
    polling = first.stub.NextTask.future(pb.NextTaskRequest(session=first.session), timeout=30)
    time.sleep(0.1)
    newer = second.join()
    assert newer.fence > older.fence
    with refused(Code.ABORTED, "another process joined as twice"):
        polling.result()
    with refused(Code.ABORTED):
        first.stub.Heartbeat(pb.HeartbeatRequest(session=first.session))
    second.leave()


def test_reconnections_of_one_process_are_not_takeovers(shared_fleet: Fleet) -> None:
    device = Device(shared_fleet.address, "flaky")
    for _ in range(8):
        device.join(instance="same")
    device.leave()


def test_alternating_takeovers_are_refused_and_the_current_process_keeps_the_name(
    shared_fleet: Fleet,
) -> None:
    rivals = Device(shared_fleet.address, "rival"), Device(shared_fleet.address, "rival")
    for attempt in range(4):
        rivals[attempt % 2].join(instance=f"process-{attempt % 2}")
    with refused(Code.ALREADY_EXISTS, "two processes claim this identity", "--name"):
        rivals[0].join(instance="process-0")
    # The session is valid and has no task.
    assert rivals[1].stub.Heartbeat(pb.HeartbeatRequest(session=rivals[1].session)).abandon
    done = shared_fleet.run(
        "client",
        "--task",
        "tasks:shift",
        "-o",
        "size=600000",
        "--server",
        shared_fleet.address,
        "--name",
        "rival",
    )
    assert done.returncode == 5
    assert "two processes claim this identity" in done.stderr
    rivals[1].leave()


def test_leaving_twice_is_accepted(shared_fleet: Fleet) -> None:
    guest = Device(shared_fleet.address, "polite")
    guest.join()
    for _ in range(2):
        guest.stub.Leave(pb.LeaveRequest(session=guest.session), timeout=5)


def test_joining_without_an_instance_is_refused(shared_fleet: Fleet) -> None:
    with refused(Code.INVALID_ARGUMENT, "instance is empty"):
        Device(shared_fleet.address, "nameless").join(instance="")


def test_the_lease_of_a_silent_client_expires(fleet: Fleet) -> None:
    fleet.init()
    fleet.start_server(lease_seconds=0.5, round__minimum_clients=5)
    device = Device(fleet.address, "silent")
    device.join()
    assert fleet.status().connected == 1
    until(lambda: fleet.status().connected == 0, "the lease to expire")
    with refused(Code.UNAUTHENTICATED):
        device.next_task()


def test_a_refused_call_releases_its_stream(fleet: Fleet) -> None:
    """This holds also while nothing else happens and Python's garbage collector does not run."""
    fleet.init()
    fleet.start_server(limits__streams_per_connection=8)
    device = Device(fleet.address, "ann", fleet.channel())
    for _ in range(100):
        with refused(Code.UNAUTHENTICATED, "join again"):
            device.stub.Heartbeat(pb.HeartbeatRequest(session="unknown"), timeout=20)
        with refused(Code.UNAUTHENTICATED, "join again"):
            list(device.stub.FetchModel(pb.FetchModelRequest(session="unknown"), timeout=20))
    device.channel.close()
