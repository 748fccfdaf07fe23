"""Measures that tasks name themselves decide what losses and accuracies decide otherwise."""

from __future__ import annotations

import json

import grpc
import pytest

from fairfleet.common.reports import MAX_MEASURES
from fairfleet.proto.v1 import fleet_pb2
from fairfleet.proto.v1 import operator_pb2 as pb
from fairfleet.server.rounds.version_scores import MAX_NAMES
from tests.support.device import Device
from tests.support.fleet import Fleet, free_port, until
from tests.support.paths import ROOT
from tests.support.scraping import Series, get, scrape

TASK = "samples.measured_tasks:measured"


def begin(fleet: Fleet, *, clients: dict[str, dict[str, object]], **settings: object) -> None:
    fleet.init(task=TASK)
    fleet.start_server(**{"round__evaluate_every": 1, "rounds": 20, **settings})
    for name, options in clients.items():
        fleet.start_client(name, task=TASK, **options)


def finished(fleet: Fleet) -> pb.StatusResponse:
    until(lambda: fleet.status().phase == pb.PHASE_FINISHED, "the end")
    return fleet.status()


def test_a_federation_with_auc_only_stops_when_its_worst_tenth_is_good_enough(
    fleet: Fleet,
) -> None:
    clients = {"ann": {"offset": 0.1}, "bob": {}}
    begin(fleet, clients=clients, measure="auc", end__worst_10_percent=0.45)
    status = finished(fleet)
    assert (status.version, status.measure, status.best_version) == (
        5,
        "auc",
        5,
    )  # bob has 0.5 at version 5
    assert "the worst-served tenth reached auc 0.5; 0.45 was the target" in fleet.log("server.log")
    lines = fleet.run("status", "--server", fleet.address)
    assert "auc" in lines.stdout
    assert "worst 10 % 0.5000" in lines.stdout
    table = fleet.run("clients", "--server", fleet.address).stdout.splitlines()
    names = [line.split()[0] for line in table if line.split()]
    assert [name for name in names if name in ("ann", "bob")] == ["bob", "ann"]
    assert "auc" in next(line for line in table if "client" in line)


def test_a_measure_of_which_lower_is_better_stops_at_a_plateau(fleet: Fleet) -> None:
    options = {"measure": "mae", "direction": "lower", "slope": 1, "offset": 5, "most": 10}
    begin(fleet, clients={"ann": options, "bob": options}, measure="mae", end__plateau=2)
    status = finished(fleet)
    assert (status.version, status.best_version) == (3, 1)  # the error grows with each version
    assert "no better worst-served tenth than mae 6" in fleet.log("server.log")
    kept = {record.version: record for record in fleet.operator().Models(pb.ModelsRequest())}
    assert [(score.measure, score.mean) for score in kept[1].scores] == [("mae", 6.0)]
    assert "best" in kept[1].kept_because


def test_a_plateau_is_one_of_the_loss_where_no_client_reports_an_accuracy(fleet: Fleet) -> None:
    options = {"loss": 2.5}
    begin(fleet, clients={"ann": options, "bob": options}, end__plateau=2)
    status = finished(fleet)
    assert (status.version, status.measure) == (3, "loss")
    assert "no better worst-served tenth than loss 2.5" in fleet.log("server.log")


def test_a_stopping_rule_that_nobody_can_fulfil_holds_the_federation_until_it_is_changed(
    fleet: Fleet,
) -> None:
    begin(fleet, clients={"ann": {}, "bob": {}}, measure="f1", end__plateau=2, rounds=4)
    until(lambda: fleet.status().held_because, "the federation to be held")
    status = fleet.status()
    assert (status.version, status.paused) == (1, True)
    assert "end.plateau can never apply: no client reports f1; reported: auc" in status.held_because
    assert "no round begins: end.plateau can never apply" in fleet.log("server.log")
    refused = fleet.run("resume", "--server", fleet.address)
    assert refused.returncode != 0
    assert "cannot resume: end.plateau can never apply" in refused.stderr
    assert "no round begins" in fleet.run("status", "--server", fleet.address).stdout
    assert fleet.stop_server() == 0
    fleet.start_server(round__evaluate_every=1, rounds=4, measure="auc", end__plateau=2)
    assert finished(fleet).version == 4


def test_a_client_with_another_direction_is_refused_by_name_and_the_others_go_on(
    fleet: Fleet,
) -> None:
    begin(fleet, clients={"ann": {}}, rounds=2, round__minimum_clients=1, round__clients=1)
    finished(fleet)
    assert fleet.stop_server() == 0
    fleet.start_server(rounds=4, round__evaluate_every=1, round__minimum_clients=2)
    fleet.start_client("ann", task=TASK)
    fleet.start_client("bob", task=TASK, direction="lower")
    finished(fleet)
    said = "client bob reports auc as a measure of which lower values are better; in this"
    assert said in fleet.log("bob.log")
    reported = fleet.query("select client, version from evaluations where evaluation is not null")
    assert sorted(reported) == [("ann", version) for version in (1, 2, 3, 4)]


def evaluating_device(fleet: Fleet, name: str, **joined: object) -> tuple[Device, int]:
    """Return a device that was asked to evaluate, and the version."""
    device = Device(fleet.address, name)
    device.join(train_samples=10, test_samples=10, **joined)
    task = device.train_task()
    chunks, encoded = device.encode()
    device.open_and_send(device.announcement(encoded).SerializeToString(), chunks)
    for _ in range(10):
        response = device.next_task()
        if response.HasField("evaluate"):
            return device, response.evaluate.model.version
    raise AssertionError(f"no evaluation came after {task.id}")


def report(device: Device, version: int, *measures: fleet_pb2.Measure) -> None:
    evaluation = fleet_pb2.Evaluation(samples=10, measures=measures)
    request = fleet_pb2.ReportEvaluationRequest(
        session=device.session, version=version, evaluation=evaluation
    )
    device.stub.ReportEvaluation(request, timeout=10)


def auc(name: str = "auc", value: float = 0.5, direction: int = 1) -> fleet_pb2.Measure:
    return fleet_pb2.Measure(name=name, value=value, direction=direction)  # type: ignore[arg-type]


HOSTILE = {
    "too many": [auc(f"m{number}") for number in range(17)],
    "twice the same": [auc(), auc()],
    "NaN": [auc(value=float("nan"))],
    "infinite": [auc(value=float("inf"))],
    "reserved": [auc("accuracy")],
    "no name": [auc("")],
    "capitals": [auc("AUC")],
    "a label's end": [auc('a"} 1\n')],
    "no direction": [auc(direction=0)],
    "an unknown direction": [auc(direction=7)],
    "nothing at all": [],
}


def test_hostile_measures_are_refused_and_an_honest_report_still_counts(fleet: Fleet) -> None:
    fleet.init(task=TASK, size=20)
    fleet.start_server(round__evaluate_every=1, round__minimum_clients=1, rounds=2)
    device, version = evaluating_device(fleet, "eve", features=["measures"])
    for what, measures in HOSTILE.items():
        evaluation = fleet_pb2.Evaluation(samples=10, measures=measures)
        request = fleet_pb2.ReportEvaluationRequest(
            session=device.session, version=version, evaluation=evaluation
        )
        with pytest.raises(grpc.RpcError) as refusal:
            device.stub.ReportEvaluation(request, timeout=10)
        assert refusal.value.code() is grpc.StatusCode.INVALID_ARGUMENT, what
        assert "the evaluation is not usable" in refusal.value.details(), what
    request.evaluation.measures.extend([auc()])
    device.stub.ReportEvaluation(request, timeout=10)
    (text,) = fleet.query("select evaluation from evaluations")[0]
    assert json.loads(text)["measures"] == {"auc": {"value": 0.5, "direction": "higher"}}
    device.leave()


def test_a_loss_of_zero_of_a_client_without_measures_is_no_missing_loss(fleet: Fleet) -> None:
    fleet.init(task=TASK, size=20)
    fleet.start_server(round__evaluate_every=1, round__minimum_clients=1, rounds=2)
    device, version = evaluating_device(fleet, "old")
    request = fleet_pb2.ReportEvaluationRequest(
        session=device.session, version=version, evaluation=fleet_pb2.Evaluation(samples=10)
    )
    device.stub.ReportEvaluation(request, timeout=10)
    (text,) = fleet.query("select evaluation from evaluations")[0]
    assert json.loads(text)["loss"] == 0.0
    device.leave()


def test_the_names_of_measures_are_bounded_and_the_chosen_one_is_always_there(
    fleet: Fleet,
) -> None:
    fleet.init(task=TASK, size=20)
    settings = {"measure": "auc", "round__evaluate_every": 1, "round__minimum_clients": 1}
    port = free_port()
    fleet.start_server(**settings, rounds=7, http__port=port)
    for number in range(6):
        device, version = evaluating_device(fleet, "eve", features=["measures"])
        measures = [auc(f"m{number}_{name}") for name in range(15)] + [auc()]
        evaluation = fleet_pb2.Evaluation(samples=10, measures=measures)
        device.stub.ReportEvaluation(
            fleet_pb2.ReportEvaluationRequest(
                session=device.session, version=version, evaluation=evaluation
            ),
            timeout=10,
        )
        device.leave()
    names = {
        name
        for (text,) in fleet.query("select evaluation from evaluations where evaluation not null")
        for name in json.loads(text)["measures"]
    }
    assert len(names) <= MAX_NAMES
    assert "auc" in names
    shown = {dict(labels)["measure"] for name, labels in until_scraped(port, "fairfleet_measure")}
    assert "auc" in shown
    assert len(shown) <= MAX_MEASURES


def until_scraped(port: int, name: str) -> list[Series]:
    """Return the series of a metric once there are any."""

    def found() -> list[Series]:
        return [key for key in scrape(port) if key[0] == name]

    series: list[Series] = until(found, name)
    listed = (ROOT / "docs" / "reference" / "metrics.md").read_text()
    for metric, _ in scrape(port):
        assert not metric.startswith("fairfleet_measure") or f"| `{metric}` |" in listed
    return series


LOWER, HIGHER = fleet_pb2.DIRECTION_LOWER, fleet_pb2.DIRECTION_HIGHER


@pytest.mark.parametrize(("setting", "name"), [("auc", "auc"), ("score:higher", "score")])
def test_the_first_client_turns_no_known_or_declared_direction_round(
    fleet: Fleet, setting: str, name: str
) -> None:
    fleet.init(task=TASK, size=20)
    fleet.start_server(measure=setting, round__evaluate_every=1, round__minimum_clients=1, rounds=3)
    device, version = evaluating_device(fleet, "eve", features=["measures"])
    with pytest.raises(grpc.RpcError) as refusal:
        report(device, version, auc(name, 0.9, LOWER))
    assert f"in this federation higher values of {name} are" in str(refusal.value.details())
    report(device, version, auc(name, 0.9, HIGHER))
    status = fleet.status()
    assert (status.measure, status.measure_direction) == (name, HIGHER)
    device.leave()


def test_a_direction_that_is_declared_later_wins_over_what_was_recorded(fleet: Fleet) -> None:
    fleet.init(task=TASK, size=20)
    port = free_port()
    settings = {"round__evaluate_every": 1, "round__minimum_clients": 1, "http__port": port}
    fleet.start_server(measure="score", rounds=2, **settings)
    for value in (0.1, 0.9):
        device, version = evaluating_device(fleet, "eve", features=["measures"])
        report(device, version, auc("score", value, LOWER))
        device.leave()
    until(lambda: fleet.status().phase == pb.PHASE_FINISHED, "the end")
    assert fleet.status().best_version == 1
    fleet.stop_server()
    fleet.start_server(measure="score:higher", rounds=2, **settings)
    status = fleet.status()
    assert (status.best_version, status.measure_direction) == (2, HIGHER)
    page = json.loads(get(f"http://127.0.0.1:{port}/api/state")[1])
    assert page["evaluations"][-1]["measures"]["score"]["better"] == "higher"
    assert page["evaluations"][-1]["improved"] == 1.0


def test_names_that_a_client_invents_keep_no_known_measure_out(fleet: Fleet) -> None:
    fleet.init(task=TASK, size=20)
    fleet.start_server(round__evaluate_every=1, round__minimum_clients=1, rounds=9)
    for number in range(MAX_NAMES // 16):
        device, version = evaluating_device(fleet, "eve", features=["measures"])
        report(device, version, *(auc(f"m{number}_{k}") for k in range(16)))
        device.leave()
    device, version = evaluating_device(fleet, "ann", features=["measures"])
    with pytest.raises(grpc.RpcError, match="report 64 measures already"):
        report(device, version, auc("invented"))
    report(device, version, auc("invented"), auc("mae", 0.5, LOWER))
    (text,) = fleet.query("select evaluation from evaluations where client = 'ann'")[0]
    assert list(json.loads(text)["measures"]) == ["mae"]
    device.leave()


def test_an_operator_learns_why_no_version_is_the_best_and_what_to_set(fleet: Fleet) -> None:
    """Two measures of the tasks' own, and none of them chosen."""
    clients = {"ann": {}, "bob": {"measure": "mae", "direction": "lower"}}
    begin(fleet, clients=clients, rounds=3)
    assert not finished(fleet).HasField("best_version")
    words = ("export", "--best", "--server", fleet.address, "--output", str(fleet.folder / "best"))
    why = "clients report no accuracy and no loss, but auc, mae. Set `measure` to one of these"
    refused = fleet.run(*words)
    assert refused.returncode == 4
    assert f"no version is the best: {why}" in " ".join(refused.stderr.split())
    assert fleet.log("server.log").count(f"no version is kept as the best: {why}") == 1
    fleet.stop_server()
    fleet.start_server(rounds=3, measure="auc")
    exported = fleet.run(*words)
    assert exported.returncode == 0, exported.stderr
    assert "version 3" in exported.stdout
