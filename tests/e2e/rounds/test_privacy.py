"""Differential privacy between real processes: updates have noise, the budget survives a crash."""

from __future__ import annotations

import json
import math
from typing import Any

import grpc
import numpy as np
import pytest

from fairfleet.common.privacy_costs import report_cost, update_cost
from fairfleet.proto.v1 import fleet_pb2 as pb
from fairfleet.server.privacy.accountant import PrivacySpent, epsilon
from tests.support.device import Device
from tests.support.fleet import Fleet, free_port, until
from tests.support.scraping import scrape, series

LOCAL = {"privacy__where": "client", "privacy__clip": 1.0, "privacy__noise_multiplier": 2.0}
CENTRAL = {"privacy__where": "server", "privacy__clip": 1.0, "privacy__noise_multiplier": 2.0}
UNIFORM = {"rule__name": "fedavg", "rule__weighting": "uniform"}
PLAIN = "plain"  # this task's model has no buffers


def spent(releases: int, multiplier: float = 2.0) -> float:
    return epsilon(PrivacySpent(releases * update_cost(multiplier)), 1e-5)


def start_clients(fleet: Fleet, **options: Any) -> None:
    for name in ("ann", "bob"):
        fleet.start_client(name, task=PLAIN, **options)


def finished(fleet: Fleet, *, rounds: int = 1, **settings: Any) -> np.ndarray:
    """Return the parameters with which a federation of two ends."""
    fleet.init(task=PLAIN)
    fleet.start_server(rounds=rounds, exit_when_finished=True, **settings)
    start_clients(fleet)
    assert set(fleet.wait_clients().values()) == {0}
    assert fleet.server is not None
    assert fleet.server.wait(20) == 0, fleet.log("server.log")
    return fleet.model(rounds).parameters


@pytest.mark.slow
def test_epsilon_grows_with_rounds_survives_a_kill_and_ends_the_federation(fleet: Fleet) -> None:
    port, limit = free_port(), spent(6) + 0.001
    settings = {
        **LOCAL,
        "rounds": 100,
        "http__port": port,
        "privacy__max_epsilon": limit,
        "codec": "int8",
    }
    fleet.init(task=PLAIN)
    fleet.start_server(**settings)
    assert fleet.status().privacy.epsilon == 0.0
    start_clients(fleet, step_seconds=0.3)
    fleet.wait_for_version(2)
    early = fleet.status().privacy.epsilon
    assert spent(2) <= early <= spent(6)
    fleet.kill_server()
    releases = fleet.query("select client, count(*) from releases group by client")
    assert min(count for _, count in releases) >= 2
    fleet.start_server(**settings)
    status = fleet.status()
    assert status.privacy.epsilon >= early  # the spent budget is restored
    assert status.privacy.max_epsilon == pytest.approx(limit)
    assert set(fleet.wait_clients().values()) == {0}  # told that training is finished
    at_end = fleet.status()
    assert at_end.privacy.epsilon == pytest.approx(spent(6))
    assert at_end.version == 6
    assert "have spent their privacy budget" in fleet.log("server.log")
    metrics = scrape(port)
    assert metrics[series("fairfleet_privacy_epsilon")] == at_end.privacy.epsilon
    assert metrics[series("fairfleet_privacy_delta")] == 1e-5
    counted = fleet.query(
        "select client, count(*), count(distinct round) from releases group by client"
    )
    assert counted == [
        ("ann", 6, 6),
        ("bob", 6, 6),
    ]  # no update got noise twice or counted twice, in spite of the kill
    privacy_status = json.loads(fleet.run("status", "--server", fleet.address, "--json").stdout)[
        "privacy"
    ]
    assert privacy_status["epsilon"] == at_end.privacy.epsilon
    assert "epsilon does not cover them" in privacy_status["not_covered"]
    text = " ".join(fleet.run("status", "--server", fleet.address).stdout.split())
    assert f"ε {spent(6):.3g} of {limit:g} at δ 1e-05" in text
    assert "sample counts, training times and evaluations are sent as they are" in text


@pytest.mark.slow
def test_updates_are_clipped_and_noised_before_they_leave_the_client(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """Each of 1003 parameters is trained by 1, so updates are clipped to length 1.

    The mean of two updates has half the variance.
    """

    def once(**settings: Any) -> np.ndarray:
        fleet = Fleet(tmp_path_factory.mktemp("fleet"))
        try:
            return finished(fleet, **settings)
        finally:
            fleet.end()

    first_run, second_run = once(**LOCAL), once(**LOCAL)
    for model in (first_run, second_run):
        assert float(np.std(model)) == pytest.approx(2.0 / math.sqrt(2), rel=0.12)
        assert abs(float(np.mean(model)) + 1 / math.sqrt(1003)) < 6 * math.sqrt(2) / math.sqrt(1003)
    assert (first_run != second_run).mean() > 0.99  # a run with the same seeds
    clipped = once(**LOCAL | {"privacy__noise_multiplier": 0.0})
    assert np.linalg.norm(clipped.astype(np.float64)) <= 1.0
    assert clipped == pytest.approx(-1 / math.sqrt(1003), rel=1e-5)


@pytest.mark.slow
def test_the_server_clips_and_noises_the_mean(fleet: Fleet) -> None:
    model = finished(fleet, rounds=2, **CENTRAL, **UNIFORM)
    assert float(np.std(model)) == pytest.approx(
        math.sqrt(2) * 2.0 / 2, rel=0.12
    )  # the noise of two rounds, over a cohort of 2
    rows = fleet.query("select round, client, what from releases order by round, client")
    assert rows == [(number, client, "model") for number in (0, 1) for client in ("ann", "bob")]


@pytest.mark.slow
def test_an_update_whose_round_is_never_committed_is_spent_too(fleet: Fleet) -> None:
    settings = {**LOCAL, "round__minimum_clients": 1}
    fleet.init(task=PLAIN)
    fleet.start_server(**settings)
    old = Device(fleet.address, "old")
    with pytest.raises(grpc.RpcError, match="does not support the noise") as refused:
        old.join()
    assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    device = Device(fleet.address, "made-by-hand")
    device.join(protects=True)
    task = device.train_task()
    assert (task.privacy.clip, task.privacy.noise_multiplier) == (1.0, 2.0)
    assert not task.privacy.HasField("reports")
    _, encoded = device.encode()
    device.open(encoded)  # and never sends the remaining chunks
    assert fleet.status().privacy.epsilon == pytest.approx(spent(1))
    fleet.kill_server()
    fleet.start_server(**settings)
    assert (fleet.status().version, fleet.status().privacy.epsilon) == (0, pytest.approx(spent(1)))
    for client in (old, device):
        client.channel.close()


@pytest.mark.slow
def test_an_update_with_too_little_noise_after_a_restart_is_refused_and_not_spent(
    fleet: Fleet,
) -> None:
    """An update is accepted if it has the noise now required, and is spent at its own noise."""
    settings = {**LOCAL, "round__minimum_clients": 1, "rounds": 9}
    fleet.init(task=PLAIN)
    fleet.start_server(**settings)
    device = Device(fleet.address, "ann")
    assert device.join(protects=True).privacy.noise_multiplier == 2.0
    old = device.train_task()
    chunks, encoded = device.encode()
    for wrong in ({"model_digest": bytes(32)}, {"round": 7}):
        with pytest.raises(
            grpc.RpcError
        ):  # not requested by the server, so not part of what it counts
            device.open(encoded, **wrong)
    assert fleet.query("select * from releases") == []
    fleet.kill_server()
    fleet.start_server(**settings | {"privacy__noise_multiplier": 4.0})
    device.channel.close()
    device = Device(fleet.address, "ann", fleet.channel())
    device.join(protects=True)
    new = device.train_task()
    assert (new.round, new.privacy.noise_multiplier) == (old.round, 4.0)
    for less in (old.privacy, pb.Privacy()):
        announced = device.announcement(encoded, privacy=less)
        for call in (
            device.stub.OpenUpload,
            lambda said: device.open_and_send(said.SerializeToString(), chunks),
        ):
            with pytest.raises(
                grpc.RpcError, match="Request a new task, and train again"
            ) as refused:
                call(announced)
            assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert fleet.query("select * from releases") == []
    more = device.open(encoded, privacy=pb.Privacy(clip=0.5, noise_multiplier=8.0))
    assert fleet.status().privacy.epsilon == pytest.approx(spent(1, 8.0))
    assert device.send(more.upload, chunks).outcome == pb.OUTCOME_COUNTED
    device.channel.close()


@pytest.mark.slow
def test_a_client_trains_again_if_a_restarted_server_requires_more_noise(
    fleet: Fleet,
) -> None:
    """The restart is in mid-training; an update with the old noise is neither sent nor spent."""
    settings = {
        **LOCAL,
        "round__minimum_clients": 1,
        "rounds": 1,
        "codec": "int8",
        "exit_when_finished": True,
    }
    fleet.init(task=PLAIN)
    fleet.start_server(**settings)
    events = fleet.watch()
    fleet.start_client("ann", task=PLAIN, step_seconds=4)
    until(lambda: any(event.HasField("training_progress") for event in events), "it to train")
    fleet.kill_server()
    fleet.start_server(**settings | {"privacy__noise_multiplier": 4.0})
    assert fleet.wait_clients() == {"ann": 0}, fleet.log("ann.log")
    assert fleet.query("select cost from releases") == [(repr(update_cost(4.0)),)]
    assert "train again" in fleet.log("ann.log")


@pytest.mark.slow
def test_reports_and_evaluations_get_noise_and_are_spent_if_configured(fleet: Fleet) -> None:
    noised = {
        "privacy__reports": "noised",
        "privacy__report_noise": 0.5,
        "round__evaluate_every": 1,
    }
    finished(fleet, **LOCAL, **noised)
    reports = [json.loads(text) for (text,) in fleet.query("select report from updates")]
    assert all(
        report["samples"] == 1 and report["seconds"] == 0 for report in reports
    )  # the tasks said 1 and 10
    # Both may fall below zero and be sent as zero, so each is compared with the true value.
    assert [report["loss_before"] == 1.0 for report in reports] == [False, False]
    evaluations = [
        json.loads(text) for (text,) in fleet.query("select evaluation from evaluations")
    ]
    assert all(
        evaluation["samples"] == 1 and evaluation["accuracy"] != 0.5 for evaluation in evaluations
    )
    costs = dict.fromkeys(("ann", "bob"), 0.0)
    for client, cost in fleet.query("select client, cost from releases"):
        costs[client] += float(cost)
    expected = update_cost(2.0) + report_cost(0.5, 1) + report_cost(0.5, 2)
    assert costs == {"ann": pytest.approx(expected), "bob": pytest.approx(expected)}


@pytest.mark.slow
def test_a_client_that_requires_noise_sends_nothing_without_it(fleet: Fleet) -> None:
    fleet.init(task=PLAIN)
    fleet.start_server(**LOCAL, round__minimum_clients=1, rounds=3)
    careful = fleet.start_client("careful", "--least-noise", "2.5", task=PLAIN)
    assert careful.wait(30) == 2
    assert "sends none with less than 2.5" in fleet.log("careful.log")
    assert fleet.query("select * from releases") == []
    fleet.start_client("careless", "--least-noise", "2", task=PLAIN)
    fleet.wait_for_version(1)


@pytest.mark.parametrize(
    ("task", "settings", "words"),
    [
        ("shift", LOCAL, "the model has buffers (norm.running_mean, norm.count)"),
        (
            PLAIN,
            CENTRAL | {"rule__name": "fedfv"},
            "rule 'fedfv' weights updates by what clients sent",
        ),
        (PLAIN, CENTRAL, "rule 'fedavg' weights updates"),  # by their samples
    ],
)
def test_a_server_that_cannot_guarantee_privacy_does_not_start(
    fleet: Fleet, task: str, settings: dict[str, Any], words: str
) -> None:
    model = fleet.init(task=task)
    flags = [f"{path.replace('__', '.')}={value}" for path, value in settings.items()]
    options = [word for flag in flags for word in ("--set", flag)]
    done = fleet.run(
        "server",
        "--listen",
        fleet.address,
        "--model",
        str(model),
        "--state-dir",
        str(fleet.state),
        *options,
    )
    assert done.returncode == 2, done.stderr
    assert words in " ".join(done.stderr.split())


@pytest.mark.slow
def test_privacy_cannot_be_enabled_for_an_existing_federation(fleet: Fleet) -> None:
    fleet.init(task=PLAIN)
    fleet.start_server(rounds=1)
    start_clients(fleet)
    fleet.wait_clients()
    assert not fleet.status().HasField("privacy")
    assert fleet.stop_server() == 0
    options = [
        word
        for path, value in LOCAL.items()
        for word in ("--set", f"{path.replace('__', '.')}={value}")
    ]
    done = fleet.run("server", "--listen", fleet.address, "--state-dir", str(fleet.state), *options)
    assert done.returncode == 2
    assert "without privacy at the client, which no epsilon covers" in " ".join(done.stderr.split())


@pytest.mark.slow
def test_randomly_selected_clients_are_hidden_from_observers_of_models(fleet: Fleet) -> None:
    chosen = {"round__clients": 1, "round__minimum_clients": 3, "privacy__amplification": True}
    fleet.init(task=PLAIN)
    fleet.start_server(rounds=4, **CENTRAL, **UNIFORM, **chosen)
    start_clients(fleet)
    fleet.start_client("cyd", task=PLAIN)
    fleet.wait_clients()
    until(lambda: fleet.version() == 4, "four rounds")
    assert fleet.query("select distinct client, drawn, among from releases") == [("", 1, 3)]
    privacy = fleet.status().privacy
    assert privacy.epsilon <= spent(4)
