"""Starts of servers and clients that cannot work, and the services of gRPC that a server offers."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from tests.support.fleet import Fleet


def test_health_and_reflection_are_served(shared_fleet: Fleet) -> None:
    with grpc.insecure_channel(shared_fleet.address) as channel:
        health = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        assert health.status == health_pb2.HealthCheckResponse.SERVING
        requests = iter([reflection_pb2.ServerReflectionRequest(list_services="")])
        (answer,) = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(requests)
    names = {service.name for service in answer.list_services_response.service}
    assert {"fairfleet.v1.Fleet", "fairfleet.v1.Operator", "grpc.health.v1.Health"} <= names


def test_frequent_pings_are_accepted(shared_fleet: Fleet) -> None:
    """With gRPC's default limits, frequent pings are answered with GOAWAY and the call is lost."""
    options = [("grpc.keepalive_time_ms", 10_000), ("grpc.http2.max_pings_without_data", 0)]
    with grpc.insecure_channel(shared_fleet.address, options) as channel:
        assert (
            health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest()).status == 1
        )


def start_server(fleet: Fleet, *words: str) -> tuple[int, str]:
    """Run the server command, and return its exit code and what it wrote to stderr."""
    done = fleet.run("server", "--listen", "127.0.0.1:0", *words)
    return done.returncode, done.stderr


def test_a_port_in_use_is_an_error(fleet: Fleet) -> None:
    model = fleet.init()
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        code, stderr = start_server(
            fleet,
            "--listen",
            f"127.0.0.1:{port}",
            "--state-dir",
            str(fleet.state),
            "--model",
            str(model),
        )
    assert code == 2
    assert f"cannot listen on 127.0.0.1:{port}" in stderr
    assert "Traceback" not in stderr


def test_a_second_server_on_the_same_state_directory_is_refused(shared_fleet: Fleet) -> None:
    code, stderr = start_server(shared_fleet, "--state-dir", str(shared_fleet.state))
    assert code == 3
    assert shared_fleet.server is not None
    assert f"is in use by another server (process {shared_fleet.server.pid})" in stderr


def test_a_directory_with_other_files_is_refused_and_unchanged(fleet: Fleet) -> None:
    (fleet.folder / "holiday.jpg").write_text("precious")
    code, stderr = start_server(fleet, "--state-dir", str(fleet.folder))
    assert code == 3
    assert "not a FairFleet state directory: it holds 'holiday.jpg'" in stderr
    assert [path.name for path in fleet.folder.iterdir()] == ["holiday.jpg"]


def test_a_directory_that_cannot_be_written_is_an_error(fleet: Fleet) -> None:
    (fleet.folder / "file").write_text("")
    code, stderr = start_server(fleet, "--state-dir", str(fleet.folder / "file" / "state"))
    assert (code, "Not a directory" in stderr) == (3, True)
    if os.geteuid() == 0:
        return  # root may write anywhere
    (fleet.folder / "locked").mkdir(mode=0o500)
    code, stderr = start_server(fleet, "--state-dir", str(fleet.folder / "locked"))
    assert (code, "Permission denied" in stderr) == (3, True)


def test_a_file_that_is_not_a_database_is_refused(fleet: Fleet) -> None:
    fleet.state.mkdir()
    (fleet.state / "federation.db").write_bytes(
        b"this is not a database, it only has the name of one" * 100
    )
    code, stderr = start_server(fleet, "--state-dir", str(fleet.state))
    assert code == 3
    assert "cannot be read as a database" in stderr


@pytest.mark.slow
def test_a_damaged_model_file_is_refused(fleet: Fleet) -> None:
    fleet.init()
    fleet.start_server(rounds=2, exit_when_finished=True)
    for name in ("a", "b"):
        fleet.start_client(name)
    fleet.wait_clients()
    assert fleet.server is not None
    fleet.server.wait(20)
    path: Path = max((fleet.state / "models").iterdir())
    path.write_bytes(path.read_bytes()[:-4] + b"oops")
    code, stderr = start_server(fleet, "--state-dir", str(fleet.state))
    assert code == 3
    assert f"{path.name} is damaged" in stderr


def test_starting_without_a_model_names_the_init_command(fleet: Fleet) -> None:
    code, stderr = start_server(fleet, "--state-dir", str(fleet.state))
    assert code == 2
    assert "fairfleet init" in stderr


def test_a_model_that_differs_from_the_state_directory_is_refused(
    fleet: Fleet, tmp_path: Path
) -> None:
    fleet.init()
    fleet.start_server()
    assert fleet.stop_server() == 0
    (fleet.folder / "model.safetensors").unlink()
    model = fleet.init(7)
    code, stderr = start_server(fleet, "--state-dir", str(fleet.state), "--model", str(model))
    assert code == 2
    assert "holds a federation of another model" in stderr
    assert "found tensor weight float32[7]" in stderr


def test_all_mistakes_in_the_settings_are_reported_together(fleet: Fleet) -> None:
    (fleet.folder / "bad.yaml").write_text("rounds: none\nplan:\n  solver: magic\ntypo: 1\n")
    code, stderr = start_server(
        fleet, "-c", str(fleet.folder / "bad.yaml"), "--set", "round.quorum=7"
    )
    assert code == 2
    for part in (
        "4 mistakes",
        "rounds:",
        "plan.solver:",
        "typo: there is no such setting",
        "round.quorum:",
    ):
        assert part in stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--task", "nowhere:task"), "no module 'nowhere'"),
        (("--task", "tasks:nothing"), "has no 'nothing'"),
        (("--task", "tasks"), "module:name"),
        (("--task", "tasks:shift", "-o", "colour=red"), "colour"),
        (("--task", "tasks:np"), "not a Task"),
        ((), "task: Field required"),
        (("--task", "tasks:shift", "--server", "nowhere"), "host:port"),
    ],
)
def test_a_client_command_that_cannot_work_names_the_mistake(
    fleet: Fleet, words: tuple[str, ...], message: str
) -> None:
    done = fleet.run("client", *words)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_a_start_that_fails_leaves_no_state_directory(fleet: Fleet) -> None:
    state = ("--state-dir", str(fleet.state))
    assert "no initial model was given" in start_server(fleet, *state)[1]
    assert not fleet.state.exists()
    (fleet.folder / "broken.safetensors").write_bytes(b"not a model")
    code, _ = start_server(fleet, *state, "--model", str(fleet.folder / "broken.safetensors"))
    assert code != 0
    assert not fleet.state.exists()
    words = ("--model", str(fleet.init()), "--pki", str(fleet.folder / "nowhere"))
    assert "cannot find" in start_server(fleet, *state, *words)[1]
    assert not fleet.state.exists()


def test_a_missing_task_is_answered_with_how_to_give_it(fleet: Fleet) -> None:
    for command in ("init", "client"):
        done = fleet.run(command)
        assert done.returncode == 2
        assert "--task my_task:task" in done.stderr


@pytest.mark.parametrize("option", ["--listen", "--set"])
def test_a_port_in_use_is_one_line_and_leaves_no_state_directory(fleet: Fleet, option: str) -> None:
    model = fleet.init()
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        value = address if option == "--listen" else f"http.port={listener.getsockname()[1]}"
        words = (option, value, "--state-dir", str(fleet.state), "--model", str(model))
        code, stderr = start_server(fleet, *words)
    assert code == 2
    assert stderr.startswith(f"error: cannot listen on {address}: the port is in use.")
    assert len(stderr.splitlines()) == 1
    assert not fleet.state.exists()
