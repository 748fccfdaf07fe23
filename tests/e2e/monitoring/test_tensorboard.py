"""The TensorBoard files and logs that a server and a simulation write, read again."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fairfleet.common.fairness import Fairness
from tests.support.fleet import Fleet
from tests.support.uneven_clients import start_uneven_clients

proto = pytest.importorskip("tensorboardX.proto.event_pb2")


ACCURACIES = ("mean", "standard_deviation", "worst_5", "worst_10", "best_5", "best_10")
IN_COMMON = {f"accuracy/{measure}" for measure in ACCURACIES} | {
    "training/loss_mean",
    "evaluation/improved_clients",
    "evaluation/strictly_improved_clients",
    "step/conflicting_clients_share",
}  # a server writes every name that a simulation writes


def events(folder: Path) -> Iterator[Any]:
    """Yield the events of a TensorBoard file: length, its checksum, record, its checksum."""
    for file in sorted(folder.rglob("events.out.tfevents.*")):
        data, position = file.read_bytes(), 0
        while position < len(data):
            (length,) = struct.unpack_from("<Q", data, position)
            yield proto.Event.FromString(data[position + 12 : position + 12 + length])
            position += 16 + length


def scalars(folder: Path) -> dict[tuple[str, int], float]:
    return {
        (value.tag, event.step): value.simple_value
        for event in events(folder)
        for value in event.summary.value
        if value.HasField("simple_value")
    }


@pytest.mark.slow
def test_event_files_of_a_server_have_the_stored_values_and_its_log_has_the_rounds(
    fleet: Fleet,
) -> None:
    fleet.init()
    folder = fleet.folder / "board"
    fleet.environment["FAIRFLEET_LOG_FORMAT"] = "json"
    fleet.start_server(
        rounds=4, round__minimum_clients=3, round__evaluate_every=2, tensorboard=folder
    )
    start_uneven_clients(fleet)
    fleet.wait_clients()
    assert fleet.stop_server() == 0
    values = scalars(folder)
    rows = fleet.query("select evaluation from evaluations where version = 4")
    accuracy = Fairness.of([json.loads(text)["accuracy"] for (text,) in rows])
    assert values["accuracy/mean", 4] == pytest.approx(accuracy.mean)
    assert values["accuracy/worst_10", 4] == pytest.approx(accuracy.worst_10)
    assert values["step/direction_norm", 3] == pytest.approx(
        fleet.records()[3]["diagnostics"]["direction_norm"]
    )
    assert {step for tag, step in values if tag == "round/updates"} == {0, 1, 2, 3}
    assert {tag for tag, _ in values} >= IN_COMMON
    lines = [json.loads(line) for line in fleet.log("server.log").splitlines()]
    committed = [
        line["attributes"]
        for line in lines
        if line["attributes"].get("fairfleet.event") == "round_committed"
    ]
    assert [line["fairfleet.round"] for line in committed] == [0, 1, 2, 3]
    joined = {
        line["attributes"]["fairfleet.client"] for line in lines if " joined " in line["body"]
    }
    assert joined == {"ann", "bob", "cyd"}


def test_log_lines_of_a_client_name_the_client_and_the_round(fleet: Fleet) -> None:
    fleet.init()
    fleet.environment["FAIRFLEET_LOG_FORMAT"] = "json"
    fleet.start_server(rounds=1, round__evaluate_every=1)
    for name in ("ann", "bob"):
        fleet.start_client(name, trouble="blind")
    fleet.wait_clients()
    lines = [json.loads(line)["attributes"] for line in fleet.log("ann.log").splitlines()]
    assert lines
    assert {line["fairfleet.client"] for line in lines} == {"ann"}
    assert [line["fairfleet.round"] for line in lines if "exception.type" in line] == [1]


@pytest.mark.slow
def test_a_simulations_event_files_have_its_learning_curve(fleet: Fleet) -> None:
    pytest.importorskip("torch")
    folder = fleet.folder / "board"
    done = fleet.run(
        "simulate",
        "--rounds",
        "2",
        "--set",
        "evaluate_every=1",
        "--tensorboard",
        str(folder),
        "--json",
    )
    assert done.returncode == 0, done.stderr
    points = json.loads(done.stdout)["points"]
    values = scalars(folder)
    assert {tag for tag, _ in values} == IN_COMMON
    assert {step: value for (tag, step), value in values.items() if tag == "accuracy/mean"} == {
        point["round"]: pytest.approx(point["mean"]) for point in points
    }
