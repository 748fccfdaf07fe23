"""One server and three clients, as `docker compose up` starts them, through all that can befall them."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fairfleet.lab import digits
from fairfleet.proto.v1 import operator_pb2 as pb
from tests.containers.deployment import Deployment, deployed, stood_in, took_part
from tests.containers.engine import ROOT, Engine
from tests.e2e.fleet import until
from tests.e2e.scraping import Prometheus, series

pytestmark = [
    pytest.mark.containers,
    pytest.mark.skipif(not shutil.which("prometheus"), reason="prometheus: scripts/install-test-packages"),
]
CUT_SECONDS = 20
EVERYBODY = {"client-0", "client-1", "client-2"}


@pytest.fixture(scope="module")
def fleet(docker: Engine) -> Iterator[Deployment]:
    with deployed(docker, clients=3) as deployment:
        yield deployment


def wait_for_rounds(fleet: Deployment, count: int) -> int:
    """Until so many more rounds are committed; the version then."""
    wanted = fleet.version() + count
    until(lambda: fleet.version() >= wanted, f"{count} more rounds")
    return fleet.version()


def wait_for_a_round_with_everybody(fleet: Deployment) -> None:
    until(lambda: took_part(fleet.rounds(fleet.version() - 1)[-1]) == EVERYBODY, "a round with all three")


def test_a_federation_in_containers_goes_on_through_kills_cuts_and_restarts(fleet: Deployment, tmp_path: Path) -> None:
    wait_for_rounds(fleet, 20)
    each_replica_has_an_identity_and_data_of_its_own(fleet)
    with watched(fleet, tmp_path) as prometheus:
        a_killed_client_is_stood_in_for_and_comes_back_as_itself(fleet)
        a_client_that_was_cut_off_comes_back(fleet)
        the_metrics_tell_the_story(fleet)
        a_restarted_server_goes_on_where_it_was(fleet)
        clients_restarted_all_at_once_are_the_same_clients(fleet)
        wait_for_rounds(fleet, 20)
        prometheus_saw_it(prometheus, fleet)
    who_is_stopped_leaves_and_ends_well(fleet)


def watched(fleet: Deployment, folder: Path) -> Prometheus:
    return Prometheus(ROOT / "deploy" / "prometheus" / "prometheus.yml", fleet.http_port, folder)


def each_replica_has_an_identity_and_data_of_its_own(fleet: Deployment) -> None:
    said = json.loads(fleet.compose("exec", "--no-TTY", "server", "fairfleet", "status", "--json"))
    assert {client["client"] for client in said["clients"]} == EVERYBODY
    shards = list(digits.partition(*digits.images()).values())
    samples = {name: record.train_samples for name, record in fleet.clients().items()}
    assert samples == {f"client-{place}": len(shards[place].train_labels) for place in range(3)}


def a_killed_client_is_stood_in_for_and_comes_back_as_itself(fleet: Deployment) -> None:
    wait_for_a_round_with_everybody(fleet)
    killed, before = fleet.client("client-1"), fleet.version()
    fleet.engine.run("kill", killed)

    def without() -> list[pb.RoundRecord]:
        return [record for record in fleet.rounds(before) if "client-1" not in took_part(record)]

    first = until(without, "a round without the killed client")[0]
    assert took_part(first) == {"client-0", "client-2"}
    assert stood_in(first) == {"client-1"}, "fedlf takes account of the row that the client left"
    wait_for_rounds(fleet, 20)
    assert fleet.metrics()[series("fairfleet_clients", state="gone")] == 1
    fleet.engine.run("rm", killed)
    fleet.up(3)  # another container in its stead
    wait_for_a_round_with_everybody(fleet)
    assert fleet.client("client-1") != killed


def a_client_that_was_cut_off_comes_back(fleet: Deployment) -> None:
    container, before = fleet.client("client-2"), fleet.version()
    with fleet.cut_off(container):
        ends = time.monotonic() + CUT_SECONDS
        until(lambda: fleet.clients()["client-2"].state == pb.CLIENT_STATE_GONE, "the server to miss it", CUT_SECONDS)
        wait_for_rounds(fleet, 5)
        time.sleep(max(0.0, ends - time.monotonic()))
    assert stood_in(next(r for r in fleet.rounds(before) if "client-2" not in took_part(r))) == {"client-2"}
    wait_for_a_round_with_everybody(fleet)
    assert fleet.client("client-2") == container, "it is the same process, not a new one"


def the_metrics_tell_the_story(fleet: Deployment) -> None:
    """The same as the records of the rounds; whoever was lost while evaluating is in no round's record."""
    found, records = fleet.metrics(), fleet.rounds()
    assert found[series("fairfleet_clients", state="gone")] == 0
    assert found[series("fairfleet_client_joins_total")] >= 5
    assert found[series("fairfleet_client_departures_total")] >= 2
    assert found[series("fairfleet_updates_total", outcome="missed")] == sum(len(r.dropped) for r in records)
    assert found[series("fairfleet_history_stand_ins_total")] == sum(len(stood_in(r)) for r in records) >= 2
    assert found[series("fairfleet_history_rows")] == 3
    assert found[series("fairfleet_evaluation_clients", outcome="reported")] >= 2
    assert 0 < found[series("fairfleet_accuracy_ratio", statistic="min")] <= 1


def a_restarted_server_goes_on_where_it_was(fleet: Deployment) -> None:
    before = fleet.version()
    fleet.compose("restart", "server")
    status = fleet.status()
    assert status.version >= before
    until(lambda: fleet.version() > status.version, "rounds after the restart")
    wait_for_a_round_with_everybody(fleet)
    numbers = [record.round for record in fleet.rounds()]
    assert numbers == list(range(len(numbers))), "every round once, none lost"


def clients_restarted_all_at_once_are_the_same_clients(fleet: Deployment) -> None:
    fleet.compose("restart", "client")
    wait_for_a_round_with_everybody(fleet)
    assert {fleet.name_of(container) for container in fleet.containers("client")} == EVERYBODY
    assert set(fleet.clients()) == EVERYBODY, "nobody took a new name"


def prometheus_saw_it(prometheus: Prometheus, fleet: Deployment) -> None:
    """What happened, as an operator finds it afterwards."""

    def value(expression: str) -> float:
        (found,) = prometheus.query(expression).values()
        return found

    assert value('max_over_time(fairfleet_clients{state="gone"}[10m])') >= 1
    assert value('resets(fairfleet_updates_total{outcome="counted"}[10m])') == 1, "the server's restart"
    assert value("min_over_time(fairfleet_model_version[10m])") < value("fairfleet_model_version") <= fleet.version()
    assert value("max_over_time(fairfleet_history_stand_ins_total[10m])") >= 2


def who_is_stopped_leaves_and_ends_well(fleet: Deployment) -> None:
    clients, (server,) = fleet.containers("client"), fleet.containers("server")
    fleet.compose("stop", "client")
    until(lambda: fleet.status().connected == 0, "the clients to have left", 5)
    assert [fleet.exit_code(client) for client in clients] == [0, 0, 0]
    fleet.compose("stop", "server")
    assert fleet.exit_code(server) == 0
