"""One server and three clients with TLS, as `docker compose up` starts them, and their faults."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from typer.testing import CliRunner

from fairfleet.common.cli.program import program
from fairfleet.common.net import channel_options
from fairfleet.common.net.server_access import ServerAccess
from fairfleet.common.tensors import Model
from fairfleet.lab import digits
from fairfleet.proto.v1 import operator_pb2 as pb
from fairfleet.proto.v1.operator_pb2_grpc import OperatorStub
from tests.containers.deployment import Deployment, deployed, stood_in, took_part
from tests.containers.engine import Engine
from tests.containers.images import VERSION
from tests.support.fleet import OWN_CONNECTION, until
from tests.support.scraping import series

pytestmark = [
    pytest.mark.containers,
    pytest.mark.skipif(
        not shutil.which("prometheus"), reason="prometheus: scripts/install-test-packages"
    ),
]
CUT_SECONDS = 20
# A cut in the middle of an upload is noticed when a ping stays unanswered; the lease starts then.
MISSED_WITHIN_SECONDS = channel_options.PING_SECONDS + channel_options.ANSWER_SECONDS + 30
EVERYBODY = {"client-0", "client-1", "client-2"}


@pytest.fixture(scope="module")
def fleet(docker: Engine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    with deployed(docker, tmp_path_factory.mktemp("deployment")) as deployment:
        yield deployment


def wait_for_rounds(fleet: Deployment, count: int) -> int:
    """Wait until this many more rounds are committed; return the version."""
    target = fleet.version() + count
    until(lambda: fleet.version() >= target, f"{count} more rounds")
    return fleet.version()


def test_a_federation_in_containers_survives_kills_cuts_and_restarts(
    fleet: Deployment, tmp_path: Path
) -> None:
    wait_for_rounds(fleet, 20)
    each_replica_has_an_identity_and_data_of_its_own(fleet)
    nobody_gets_in_without_a_certificate_or_does_what_is_not_theirs(fleet, tmp_path)
    who_runs_is_nobody_and_can_write_nowhere_else(fleet)
    a_killed_client_is_stood_in_for_and_comes_back_as_itself(fleet)
    a_client_that_was_cut_off_comes_back(fleet)
    check_metrics(fleet)
    a_restarted_server_goes_on_where_it_was(fleet)
    clients_restarted_all_at_once_are_the_same_clients(fleet)
    wait_for_rounds(fleet, 20)
    check_prometheus(fleet)
    check_exported_model(fleet, tmp_path)
    check_client_with_torch(fleet)
    a_device_from_outside_is_enrolled_where_the_ca_is(fleet, tmp_path)
    who_is_stopped_leaves_and_ends_well(fleet)
    the_same_without_tls_runs_beside_it(fleet)


def each_replica_has_an_identity_and_data_of_its_own(fleet: Deployment) -> None:
    said = json.loads(fleet.compose("exec", "--no-TTY", "server", "fairfleet", "status", "--json"))
    assert {client["client"] for client in said["clients"]} == EVERYBODY
    shards = list(digits.partition(*digits.images()).values())
    samples = {name: record.train_samples for name, record in fleet.clients().items()}
    assert samples == {f"client-{place}": len(shards[place].train_labels) for place in range(3)}


def nobody_gets_in_without_a_certificate_or_does_what_is_not_theirs(
    fleet: Deployment, folder: Path
) -> None:
    def ask(channel: grpc.Channel) -> grpc.StatusCode:
        with channel, pytest.raises(grpc.RpcError) as refused:
            OperatorStub(channel).Status(pb.StatusRequest(), timeout=10)
        code: grpc.StatusCode = refused.value.code()
        return code

    address = f"127.0.0.1:{fleet.port}"
    assert ask(grpc.insecure_channel(address, OWN_CONNECTION)) is grpc.StatusCode.UNAVAILABLE
    clients = folder / "client-0.fleet"
    fleet.compose("cp", "client:/pki/clients/client-0.fleet", str(clients))
    assert (
        ask(ServerAccess(address, clients).channel(OWN_CONNECTION))
        is grpc.StatusCode.PERMISSION_DENIED
    )

    def secrets(service: str) -> set[str]:
        return set(fleet.compose("exec", "--no-TTY", service, "find", "/pki", "-type", "f").split())

    own = {f"/pki/server/{name}" for name in ("ca.crt", "server.crt", "server.key")}
    assert secrets("server") == {*own, "/pki/operator/operator.fleet"}, "and not the CA's key"
    assert secrets("client") == {f"/pki/clients/client-{number}.fleet" for number in range(100)}


def who_runs_is_nobody_and_can_write_nowhere_else(fleet: Deployment) -> None:
    for service in ("server", "client"):
        output = fleet.compose(
            "exec", "--no-TTY", service, "cat", "/proc/1/status", "/proc/1/cmdline"
        )
        assert output.split("Uid:")[1].split()[0] == "10001"
        assert (
            int(output.split("CapEff:")[1].split()[0], 16)
            == int(output.split("CapBnd:")[1].split()[0], 16)
            == 0
        )
        assert output.split("NoNewPrivs:")[1].split()[0] == "1"
        assert output.split("\n")[-1].startswith("dumb-init\0")
        look = "for f in / /opt/fairfleet /etc /tasks /var/tmp; "
        look += "do touch $f/x 2>/dev/null && echo $f; done; touch /tmp/x"
        assert fleet.compose("exec", "--no-TTY", service, "sh", "-c", look) == ""
        limits = fleet.engine.inspect(fleet.containers(service)[0])["HostConfig"]
        assert limits["Memory"] > 0
        assert limits["PidsLimit"] > 0
        assert limits["RestartPolicy"]["Name"] == "unless-stopped"


def a_killed_client_is_stood_in_for_and_comes_back_as_itself(fleet: Deployment) -> None:
    fleet.wait_for_a_round_with(EVERYBODY)
    killed, before = fleet.client("client-1"), fleet.version()
    fleet.engine.run("kill", killed)

    def without() -> list[pb.RoundRecord]:
        return [record for record in fleet.rounds(before) if "client-1" not in took_part(record)]

    first = until(without, "a round without the killed client")[0]
    assert took_part(first) == {"client-0", "client-2"}
    assert stood_in(first) == {"client-1"}, "fedlf uses the stored row of the absent client"
    wait_for_rounds(fleet, 20)
    assert fleet.metrics()[series("fairfleet_clients", state="gone")] == 1
    fleet.engine.run("rm", killed)
    fleet.up("client")  # another container replaces it
    fleet.wait_for_a_round_with(EVERYBODY)
    assert fleet.client("client-1") != killed


def a_client_that_was_cut_off_comes_back(fleet: Deployment) -> None:
    container, before = fleet.client("client-2"), fleet.version()
    with fleet.cut_off(container):
        ends = time.monotonic() + CUT_SECONDS
        until(
            lambda: fleet.clients()["client-2"].state == pb.CLIENT_STATE_GONE,
            "the server to miss it",
            MISSED_WITHIN_SECONDS,
        )
        wait_for_rounds(fleet, 5)
        time.sleep(max(0.0, ends - time.monotonic()))
    assert stood_in(next(r for r in fleet.rounds(before) if "client-2" not in took_part(r))) == {
        "client-2"
    }
    fleet.wait_for_a_round_with(EVERYBODY)
    assert fleet.client("client-2") == container, "it is the same process"


def check_metrics(fleet: Deployment) -> None:
    """Check that the metrics agree with the records of the rounds.

    A client that was lost while evaluating is in no round's record.
    """
    metrics, records = fleet.metrics(), fleet.rounds()
    assert metrics[series("fairfleet_clients", state="gone")] == 0
    assert metrics[series("fairfleet_client_joins_total")] >= 5
    assert metrics[series("fairfleet_client_departures_total")] >= 2
    assert metrics[series("fairfleet_updates_total", outcome="missed")] == sum(
        len(r.dropped) for r in records
    )
    assert (
        metrics[series("fairfleet_history_stand_ins_total")]
        == sum(len(stood_in(r)) for r in records)
        >= 2
    )
    assert metrics[series("fairfleet_history_rows")] == 3
    assert metrics[series("fairfleet_evaluation_clients", outcome="reported")] >= 2
    assert 0 < metrics[series("fairfleet_accuracy_ratio", statistic="min")] <= 1


def a_restarted_server_goes_on_where_it_was(fleet: Deployment) -> None:
    before = fleet.version()
    fleet.compose("restart", "server")
    status = fleet.status()
    assert status.version >= before
    until(lambda: fleet.version() > status.version, "rounds after the restart")
    fleet.wait_for_a_round_with(EVERYBODY)
    numbers = [record.round for record in fleet.rounds()]
    assert numbers == list(range(len(numbers))), "every round is there once"


def clients_restarted_all_at_once_are_the_same_clients(fleet: Deployment) -> None:
    fleet.compose("restart", "client")
    wait_for_rounds(fleet, 1)  # the newest one before had every client, too
    fleet.wait_for_a_round_with(EVERYBODY)
    assert {fleet.name_of(container) for container in fleet.containers("client")} == EVERYBODY
    assert set(fleet.clients()) == EVERYBODY, "no client has a new name"


def check_prometheus(fleet: Deployment) -> None:
    """Check what Prometheus recorded; it scrapes every 5 s over the containers' network."""

    def value(expression: str) -> float:
        (sample,) = fleet.prometheus().query(expression).values()
        return sample

    until(
        lambda: fleet.prometheus().query("time() - timestamp(fairfleet_model_version) < 5"),
        "a fresh scrape",
    )
    assert value('max_over_time(fairfleet_clients{state="gone"}[10m])') >= 1
    assert value('resets(fairfleet_updates_total{outcome="counted"}[10m])') == 1, (
        "the server's restart"
    )
    assert (
        value("min_over_time(fairfleet_model_version[10m])")
        < value("fairfleet_model_version")
        <= fleet.version()
    )
    assert value("max_over_time(fairfleet_history_stand_ins_total[10m])") >= 2


def check_exported_model(fleet: Deployment, folder: Path) -> None:
    """Check the exported model on the clients' own test images."""
    file = folder / "trained.safetensors"
    before = fleet.metrics()[series("fairfleet_model_version")]
    words = ["export", "--credentials", str(fleet.operator), "--output", str(file), "--json"]
    result = CliRunner().invoke(program("export"), words)
    assert result.exit_code == 0, result.output
    assert json.loads(result.output)["version"] >= before
    model = Model.load(file)[0].named()
    accuracies = [digits.softmax(str(shard)).evaluate(model).accuracy or 0.0 for shard in range(3)]
    assert min(accuracies) > 0.8, accuracies


def check_client_with_torch(fleet: Deployment) -> None:
    """Run the service for graphics cards on the processor."""
    fleet.engine.run("tag", f"fairfleet-client:{VERSION}", f"fairfleet-client-cuda:{VERSION}")
    fleet.up("gpu-client")
    fleet.wait_for_a_round_with(EVERYBODY | {"client-3"})
    fleet.compose("--profile", "gpu", "stop", "gpu-client")


def a_device_from_outside_is_enrolled_where_the_ca_is(fleet: Deployment, folder: Path) -> None:
    words = (
        "enroll",
        "kitchen",
        "--pki",
        "/pki/ca",
        "--address",
        f"127.0.0.1:{fleet.port}",
        "--output",
        "-",
    )
    file = folder / "kitchen.fleet"
    with open(os.open(file, os.O_CREAT | os.O_WRONLY, 0o600), "w") as opened:
        opened.write(fleet.compose("run", "--rm", "--no-TTY", "pki", *words))
    task = ("--task", "fairfleet.lab.digits:softmax", "--option", "shard=5")
    with fleet.device(
        "client", "--credentials", str(file), "--state-dir", str(folder / "state"), *task
    ):
        fleet.wait_for_a_round_with(EVERYBODY | {"kitchen"})
    assert "everything was there" in fleet.compose("run", "--rm", "--no-TTY", "pki"), (
        "no certificate is renewed too early"
    )


def who_is_stopped_leaves_and_ends_well(fleet: Deployment) -> None:
    clients, (server,) = fleet.containers("client"), fleet.containers("server")
    fleet.compose("stop", "client")
    until(lambda: fleet.status().connected == 0, "the clients to have left", 5)
    assert [fleet.exit_code(client) for client in clients] == [0, 0, 0]
    fleet.compose("stop", "server")
    assert fleet.exit_code(server) == 0


def the_same_without_tls_runs_beside_it(fleet: Deployment) -> None:
    fleet.up("insecure-client")
    fleet.compose(
        "--profile", "insecure-demo", "exec", "--no-TTY", "insecure-server", "fairfleet", "health"
    )
    with grpc.insecure_channel(f"127.0.0.1:{fleet.insecure_port}", OWN_CONNECTION) as channel:

        def version() -> int:
            return int(
                OperatorStub(channel)
                .Status(pb.StatusRequest(), timeout=10, wait_for_ready=True)
                .version
            )

        until(lambda: version() > 5, "rounds in the clear")
